"""Text to tokens and back: by bytes, or as a `tokenizer.json` says.

Bytes need nothing to be installed or downloaded, and UTF-8 leaves some unused: 0 stands between documents, and 255,
which no text holds, hides what a masked model shall find.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # as tokenizers call the end of a text
_MASKS = ("[MASK]", "<mask>")


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; it says why, and what to do."""


class Tokenizer(Protocol):
    name: str  # what `open_tokenizer` makes it from
    identity: str  # changes with what it does
    vocabulary: int
    end: int | None  # the token that ends a document
    mask: int | None  # the token that hides others

    def encode(self, text: bytes) -> Tokens: ...

    def encode_prompt(self, text: str) -> list[int]: ...  # with what the model expects before a text

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    name = identity = "bytes"
    vocabulary = 256
    end: int | None = 0
    mask: int | None = 255

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        text = bytes(token for token in tokens if token < 256 and token not in (self.end, self.mask))
        return text.decode(errors="replace")


class FromFile:
    """A tokenizer of Hugging Face's library `tokenizers`."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(
                f"there is no tokenizer {file}: name a tokenizer.json, a folder that has one, or bytes"
            )
        try:
            from tokenizers import Tokenizer as Library
        except ModuleNotFoundError:
            raise TokenizerError(f"to read {file}: pip install tokenizers (or use the tokenizer bytes)") from None
        try:
            self._library: Any = Library.from_file(str(file))
        except Exception as error:
            raise TokenizerError(f"{file} is not a tokenizer: {error}") from None
        known: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.name = str(file.resolve())
        self.vocabulary = max(known.values(), default=-1) + 1
        self.end: int | None = next((known[name] for name in (*_told_end(file), *_ENDS) if name in known), None)
        self.mask: int | None = next((known[name] for name in _MASKS if name in known), None)
        self.identity = hashlib.sha256(file.read_bytes()).hexdigest() + f" {self.end}"

    def encode(self, text: bytes) -> Tokens:
        [found] = self._library.encode_batch_fast([text.decode(errors="replace")], add_special_tokens=False)
        return np.asarray(found.ids, np.uint32)

    def encode_prompt(self, text: str) -> list[int]:
        tokens: list[int] = self._library.encode(text).ids
        return tokens

    def decode(self, tokens: list[int]) -> str:
        text: str = self._library.decode(tokens)
        return text


def open_tokenizer(name: str) -> Tokenizer:
    return Bytes() if name == "bytes" else FromFile(Path(name).expanduser())


def _told_end(file: Path) -> list[str]:
    """What the settings beside a tokenizer call the end of a text."""
    try:
        told = json.loads((file.parent / "tokenizer_config.json").read_text()).get("eos_token")
    except (OSError, ValueError):
        return []
    told = told.get("content") if isinstance(told, dict) else told
    return [told] if isinstance(told, str) else []
