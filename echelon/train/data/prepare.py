"""Text into a file of tokens, by as many processes as there are cores.

Documents are cut into pieces of about a megabyte, at the end of a line, and gathered into tasks of about that size. The
cuts depend on the documents alone, and results are written in the order of the tasks: so the file is the same, however
many processes work. It is written beside and renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from echelon.models.tokenizer import Bytes, Tokenizer
from echelon.train.data.errors import DataError
from echelon.train.data.token_file import LIMITS, Description, describe, description_path, write_description
from echelon.train.data.tokenizer import open_tokenizer
from echelon.train.data.workers import in_order

PIECE = 2**20  # bytes
_WORTH_A_PROCESS = 2**23  # bytes
_LINE = 2**16  # bytes in which the end of a line is looked for


@dataclass(frozen=True)
class FilePiece:
    """A document's bytes from about `first` to about `end`."""

    path: Path
    first: int
    end: int
    size: int  # of the whole document

    @property
    def weight(self) -> int:
        return self.end - self.first

    @property
    def last(self) -> bool:
        return self.end == self.size

    def read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                begin, end = (_cut(file, at, self.size) for at in (self.first, self.end))
                file.seek(begin)
                return file.read(end - begin)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class TextPiece:
    """A whole document."""

    text: str
    last = True

    @property
    def weight(self) -> int:
        return len(self.text)

    def read(self) -> bytes:
        return self.text.encode(errors="replace")


def file_pieces(path: Path, size: int) -> Iterator[FilePiece]:
    """All pieces of a document."""
    for first in range(0, size, PIECE):
        yield FilePiece(path, first, min(first + PIECE, size), size)


Piece = FilePiece | TextPiece
Task = list[Piece]


def fitting_dtype(tokenizer: Tokenizer, wanted: str = "auto") -> str:
    """The dtype for a tokenizer's tokens: the smallest, or the one that is wanted if they fit."""
    fitting = [dtype for dtype, limit in LIMITS.items() if tokenizer.vocabulary <= limit]
    if wanted == "auto":
        return fitting[0]
    if wanted not in fitting:
        raise DataError(f"{wanted} cannot hold a vocabulary of {tokenizer.vocabulary}: use {' or '.join(fitting)}")
    return wanted


def useful_workers(size: int, tokenizer: Tokenizer) -> int:
    """How many processes are faster than one, for so many bytes: bytes as tokens are only copied."""
    most = 1 if isinstance(tokenizer, Bytes) else os.cpu_count() or 1
    return max(1, min(most, size // _WORTH_A_PROCESS))


def prepare(
    documents: Iterable[Piece],
    tokenizer: Tokenizer,
    out: Path,
    *,
    dtype: str,
    workers: int = 1,
    inputs: str = "",
    done: Callable[[int], object] = lambda weight: None,
) -> Description:
    """Tokenise documents into the file `out`; `done` is told the weight of what has become tokens."""
    refuse_what_is_no_token_file(out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    tokens = ended = 0
    try:
        with partial.open("wb") as file, contextlib.closing(_encoded(documents, tokenizer, dtype, workers)) as results:
            for task, encoded in results:
                tokens += file.write(encoded) // np.dtype(dtype).itemsize
                ended += sum(piece.last for piece in task)
                done(sum(piece.weight for piece in task))
            file.flush()
            os.fsync(file.fileno())
        described = Description(
            dtype=dtype,
            tokens=tokens,
            vocabulary=tokenizer.vocabulary,
            tokenizer=tokenizer.name,
            documents=ended,
            mask=tokenizer.mask,
            inputs=inputs,
        )
        if not ended:
            raise DataError(f"there is no document to write into {out}")
        description_path(out).unlink(missing_ok=True)  # a file without description is better than with a wrong one
        partial.rename(out)
        write_description(description_path(out), described)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    return described


def refuse_what_is_no_token_file(out: Path) -> None:
    """`out`, and the description beside it, are replaced: not anything else."""
    if out.suffix != ".bin":
        raise DataError(f"{out}: the name of a file of tokens ends in .bin")
    if not out.parent.is_dir():
        raise DataError(f"{out} cannot be written: there is no folder {out.parent}")
    try:
        describe(out)
    except DataError:
        raise DataError(f"{description_path(out)} would be replaced, and is not ours: choose another name") from None


def _encoded(
    documents: Iterable[Piece], tokenizer: Tokenizer, dtype: str, workers: int
) -> Generator[tuple[Task, bytes], None, None]:
    """Each task and its tokens, in order."""
    tasks = _tasks(documents)
    if workers > 1:
        yield from in_order(_encode_by_name, tasks, workers, tokenizer.name, dtype)
        return
    for task in tasks:
        yield task, _encode(task, tokenizer, dtype)


def _tasks(documents: Iterable[Piece]) -> Iterator[Task]:
    task: Task = []
    size = 0
    for piece in documents:
        task.append(piece)
        size += piece.weight
        if size >= PIECE:
            yield task
            task, size = [], 0
    if task:
        yield task


def _encode(task: Task, tokenizer: Tokenizer, dtype: str) -> bytes:
    end = [] if tokenizer.end is None else [tokenizer.end]
    parts = []
    for piece in task:
        parts.append(tokenizer.encode(piece.read()))
        if piece.last:
            parts.append(np.asarray(end, np.uint32))
    return np.concatenate(parts).astype(np.dtype(dtype).newbyteorder("<")).tobytes()


def _encode_by_name(task: Task, tokenizer: str, dtype: str) -> bytes:
    return _encode(task, _opened(tokenizer), dtype)


_opened = functools.cache(open_tokenizer)  # once in each process


def _cut(file: BinaryIO, at: int, size: int) -> int:
    """Where a document is cut that should be cut at a place: after the next end of a line, or else between letters."""
    if at in (0, size):
        return at
    file.seek(at)
    following = file.read(_LINE)
    line = following.find(b"\n") + 1
    if line:
        return at + line
    inside = next((skipped for skipped, byte in enumerate(following) if byte & 0xC0 != 0x80), 0)
    return at + inside
