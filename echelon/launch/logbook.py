"""What a rank is doing, written where it outlives the rank.

A logbook is a piece of memory: a row of numbers for each of the rank's groups, written before and after every
operation (numbers, because that takes a few dozen nanoseconds), and a header in JSON for what seldom changes. Under
`echelon run` the memory is a file that the launcher can still read when the rank has been killed.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "ECHELON_LOGBOOKS"  # where the launcher wants them, each named by its rank
# The columns of a row: operations begun; the elements of the last one; the rank's own count; then the last operations,
# number n at `LAST + n % KEPT`, each with whether it is under way.
SEQUENCE, ELEMENTS, COUNT, LAST = range(4)
KEPT = 8
_COLUMNS = LAST + KEPT
_ROWS = 2048
_HEADER = _ROWS * _COLUMNS * 8  # where the header begins, with its length
_BYTES = 2**20
_REMEMBERED = 16  # groups that were closed, with what the rank had done in them


@dataclass(frozen=True, slots=True)
class GroupState:
    """What a rank had done in one group: `operation`, number `sequence`, was the last it began."""

    row: int
    name: str
    dimension: str
    ranks: list[int]
    timeout: float
    sequence: int
    under_way: bool
    operation: str
    before: dict[int, str]  # the operations before it, by number, as far as they are known
    elements: int
    count: int  # by which a rank's operations in all its groups are in order
    message: Message | None


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a rank waits for, or waits to be taken; `number` tells it from others of the same words."""

    number: int
    text: str
    peer: int | None  # None: anyone


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank was doing. `ending` tells how it ended, in words, empty while it runs; `code` is its exit code."""

    rank: int
    ending: str
    code: int
    groups: list[GroupState] = field(default_factory=list)  # those that were closed lately too

    @classmethod
    def of(cls, snapshot: dict[str, Any]) -> RankState:
        header = snapshot["header"]
        names = header["operations"]
        groups = []
        rows = [(int(row), group, snapshot["rows"][int(row)]) for row, group in header["groups"].items()]
        for row, (name, dimension, runs, timeout), columns in rows + [(-1, *closed) for closed in header["closed"]]:
            sequence, elements, count, *last = columns
            # The oldest one may be the next already: its number is written last.
            numbers = range(max(sequence - KEPT + 2, 1), sequence + 1)
            texts = {n: names[code] for n in numbers if (code := last[n % KEPT] // 2) < len(names)}
            message = Message(*header["messages"][str(row)]) if str(row) in header["messages"] else None
            operation = texts.pop(sequence, "")
            under_way = bool(last[sequence % KEPT] % 2)
            begun = sequence, under_way, operation, texts, elements, count, message
            groups.append(GroupState(row * _COLUMNS, name, dimension, _unpacked(runs), timeout, *begun))
        return cls(header["rank"], header["ending"], header["code"], groups)


class Logbook:
    """The writer's side, in the rank."""

    def __init__(self, rank: int, file: Path | None = None) -> None:
        self.rows = _open(file)
        self.count = itertools.count(1)
        self._memory = self.rows.cast("B")
        self._lock = threading.Lock()
        self._free = list(range(_ROWS - 2, -1, -1))
        self._codes: dict[tuple[str, object], int] = {}
        self._made: dict[tuple[str, tuple[int, ...]], int] = {}
        self._header: dict[str, Any] = {
            "rank": rank,
            "ending": "",
            "code": 0,
            "operations": [],
            "groups": {},
            "closed": [],
            "messages": {},
        }
        self._write()

    def open_row(self, name: str, ranks: list[int], timeout: float) -> int:
        """A row for a group; the same name may return (PyTorch counts anew after a destroy), and is told apart.

        When the book is full, further groups are not written down: they share the last row, which nobody reads.
        """
        with self._lock:
            key = name, tuple(ranks)
            self._made[key] = nth = self._made.get(key, 0) + 1
            row = self._free.pop() if self._free else _ROWS - 1
            start = row * _COLUMNS
            self.rows[start : start + _COLUMNS] = memoryview(bytes(_COLUMNS * 8)).cast("Q")
            if row < _ROWS - 1:
                title = name if nth == 1 else f"{name} (made anew, {nth})"
                self._header["groups"][str(row)] = [title, "", _packed(ranks), timeout]
                self._write()
            return start

    def describe_row(self, start: int, dimension: str | None = None, timeout: float | None = None) -> None:
        with self._lock:
            group = self._header["groups"].get(str(start // _COLUMNS))
            if group is not None:
                group[1] = group[1] if dimension is None else dimension
                group[3] = group[3] if timeout is None else timeout
                self._write()

    def close_row(self, start: int) -> None:
        with self._lock:
            row = start // _COLUMNS
            group = self._header["groups"].pop(str(row), None)
            if group is not None:
                columns = self.rows[start : start + _COLUMNS].tolist()
                self._header["closed"] = [*self._header["closed"], [group, columns]][-_REMEMBERED:]
                self._write()
            if row < _ROWS - 1:
                self._free.append(row)

    def code(self, operation: str, dtype: object) -> int:
        """The number that stands for an operation on a dtype; one more while it is under way."""
        found = self._codes.get((operation, dtype))
        if found is not None:
            return found
        with self._lock:
            self._header["operations"].append(f"{operation} of {dtype}".replace("torch.", "") if dtype else operation)
            self._codes[operation, dtype] = code = 2 * (len(self._header["operations"]) - 1)
            self._write()
            return code

    def note_messages(self, messages: dict[int, Message]) -> None:
        """What messages are waited for, by the row of their group."""
        noted = {str(start // _COLUMNS): list(astuple(message)) for start, message in messages.items()}
        if noted != self._header["messages"]:
            with self._lock:
                self._header["messages"] = noted
                self._write()

    def end(self, how: str, code: int) -> None:
        with self._lock:
            self._header["ending"], self._header["code"] = how, code
            self._write()

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return _read(self._memory)

    def _write(self) -> None:
        text = json.dumps(self._header).encode()
        while len(text) > _BYTES - _HEADER - 8 and self._header["groups"]:  # a full book leaves groups out
            self._header["groups"].popitem()
            text = json.dumps(self._header | {"closed": []}).encode()
        self.rows[_HEADER // 8] = 0  # a reader that comes now waits for the length
        self._memory[_HEADER + 8 : _HEADER + 8 + len(text)] = text
        self.rows[_HEADER // 8] = len(text)


def read(file: Path) -> dict[str, Any] | None:
    """A rank's logbook, from its file; None if there is nothing to be read (a rank may die while it writes)."""
    try:
        return _read(memoryview(file.read_bytes()))
    except (OSError, ValueError):
        return None


def _read(memory: memoryview) -> dict[str, Any]:
    length = int.from_bytes(memory[_HEADER : _HEADER + 8], "little")
    header = json.loads(bytes(memory[_HEADER + 8 : _HEADER + 8 + length]))
    used = 1 + max((int(row) for row in header["groups"]), default=-1)
    words = memory[: used * _COLUMNS * 8].cast("Q").tolist()
    return {"header": header, "rows": [words[i : i + _COLUMNS] for i in range(0, len(words), _COLUMNS)]}


def _open(file: Path | None) -> memoryview:
    if file is None:
        return memoryview(mmap.mmap(-1, _BYTES)).cast("Q")
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(handle, 0, _BYTES)  # now, for to run out of memory later would kill the rank
        return memoryview(mmap.mmap(handle, _BYTES)).cast("Q")
    except OSError:
        return _open(None)
    finally:
        os.close(handle)


def _packed(ranks: list[int]) -> list[list[int]]:
    """Ranks as runs (first, last, step), of which most groups have one."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and (len(runs[-1]) == 1 or rank - runs[-1][1] == runs[-1][2]):
            first = runs[-1][0]
            runs[-1] = [first, rank, rank - (first if len(runs[-1]) == 1 else runs[-1][1])]
        else:
            runs.append([rank])
    return runs


def _unpacked(runs: list[list[int]]) -> list[int]:
    ranks: list[int] = []
    for first, *rest in runs:
        ranks += [first] if not rest else list(range(first, rest[0] + (1 if rest[1] > 0 else -1), rest[1]))
    return ranks
