"""Files of tokens: `NAME.bin` holds nothing but tokens (uint16 or uint32, little-endian), `NAME.json` describes them.

A file without a description, such as nanoGPT's, can be read too: [data] dtype says then what it holds. A file is mapped
into memory, so a rank reads what it needs, and ranks of one node share what was read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.train.data.errors import DataError

FORMAT = 1
LIMITS = {"uint16": 2**16, "uint32": 2**32}  # how many tokens a vocabulary can have


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is known about a file of tokens."""

    dtype: str
    tokens: int
    vocabulary: int  # of its tokenizer
    tokenizer: str  # "bytes", or the tokenizer's file
    documents: int
    mask: int | None = None  # the tokenizer's token for what is hidden, if it has one
    inputs: str = ""  # a hash of what it was made from
    format: int = FORMAT


def description_path(path: Path) -> Path:
    return path.with_suffix(".json")


def describe(path: Path) -> Description | None:
    """The description beside a file; None if there is none."""
    beside = description_path(path)
    try:
        found: dict[str, Any] = json.loads(beside.read_text())
        if found["format"] != FORMAT:
            raise DataError(f"{beside} has format {found['format']}, and this version of Echelon reads {FORMAT}")
        described = Description(**found)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{beside} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{beside} describes no file of tokens ({error}): prepare {path} again") from None
    if described.dtype not in LIMITS:
        raise DataError(f"{beside} has dtype {described.dtype!r}, which is none of {', '.join(LIMITS)}")
    return described


def write_description(path: Path, described: Description) -> None:
    path.write_text(json.dumps(asdict(described), indent=1) + "\n")


def open_tokens(path: Path, dtype: str) -> tuple[NDArray[Any], Description | None]:
    """The tokens of a file, mapped into memory, and what is known about them; `dtype` is for a file without a
    description.
    """
    described = describe(path)
    dtype = described.dtype if described else dtype
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    count, left = divmod(size, np.dtype(dtype).itemsize)
    if left or (described and count != described.tokens):
        promised = f"{described.tokens} tokens of {dtype}" if described else f"whole tokens of {dtype}"
        raise DataError(f"{path} has {size} bytes, which are not {promised}: was it cut off?")
    if not count:
        return np.empty(0, dtype), described
    try:
        return np.asarray(np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")), described
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, eq=False)
class FileWindows:
    """A run of tokens as windows: number i is tokens[i·length : i·length + length + 1]."""

    tokens: NDArray[Any]
    length: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        places = numbers[:, None] * self.length + np.arange(self.length + 1)
        return np.asarray(self.tokens[places], np.int64)


def split(tokens: NDArray[Any], length: int, share: float) -> tuple[FileWindows, FileWindows | None]:
    """Windows to train on, and the last `share` of them, at least one, kept back. They have no token in common."""
    if share <= 0:
        return FileWindows(tokens, length), None
    count = (len(tokens) - 2) // length
    end = (count - max(1, round(count * share))) * length + 1
    return FileWindows(tokens[: max(0, end)], length), FileWindows(tokens[max(0, end) :], length)
