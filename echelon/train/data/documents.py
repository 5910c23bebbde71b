"""The documents that become a file of tokens: files, or rows of a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from echelon.models.tokenizer import Tokenizer
from echelon.train.data import files, hugging_face
from echelon.train.data.bar import bar
from echelon.train.data.errors import DataError
from echelon.train.data.prepare import Piece, TextPiece, file_pieces


class Documents(Protocol):
    @property
    def bytes(self) -> int:
        """How much there is, about."""
        ...

    def pieces(self) -> Iterator[Piece]: ...

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """A hash that changes when a document or the tokenizer does."""
        ...


@dataclass(frozen=True)
class Files:
    paths: list[Path]
    sizes: list[int]

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def pieces(self) -> Iterator[Piece]:
        for path, size in zip(self.paths, self.sizes, strict=True):
            yield from file_pieces(path, size)

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        return _hash([[str(path.resolve()), *_state(path)] for path in self.paths], tokenizer)


@dataclass(frozen=True, eq=False)
class Rows:
    """A column of a dataset."""

    dataset: Any
    column: str

    @property
    def bytes(self) -> int:
        return int(self.dataset.data.nbytes)

    def pieces(self) -> Iterator[Piece]:
        for rows in self.dataset.select_columns([self.column]).iter(batch_size=1000):
            for text in rows[self.column]:
                if text:
                    yield TextPiece(text)

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        return _hash([self.dataset._fingerprint, self.column], tokenizer)


def of_files(inputs: Sequence[str], passed_over: Callable[[Path], None] = lambda path: None) -> Files:
    paths = files.find(inputs, passed_over)
    return Files(paths, [_state(path)[0] for path in paths])


def of_dataset(path: str, split: str, column: str) -> Rows:
    return Rows(hugging_face.open_dataset(path, split, column), column)


def progress(documents: Documents) -> AbstractContextManager[Callable[[int], None]]:
    return bar("tokenising", documents.bytes)


def _state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return state.st_size, state.st_mtime_ns


def _hash(content: list[Any], tokenizer: Tokenizer) -> str:
    return hashlib.sha256(json.dumps([content, tokenizer.identity]).encode()).hexdigest()
