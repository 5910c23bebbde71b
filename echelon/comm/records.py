"""What a record is, and records on disk. Needs no PyTorch: whoever reads a job's records need not wait for it.

On disk each rank has a file of numbers, a fixed count for each record, and one of names in JSON: a number that stands
for a name is its place among them. A thread writes what is over once a second, so that a killed rank leaves all but
its last second, and memory stays flat.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

_EPOCH = time.time_ns() - time.perf_counter_ns()


def now() -> int:
    """Nanoseconds since the epoch, by a clock that never jumps."""
    return time.perf_counter_ns() + _EPOCH


@dataclass(slots=True)
class Record:
    """One operation, or one side of a message, as a rank saw it. Times are in nanoseconds since the epoch."""

    operation: str
    group: str  # its name
    dimension: str  # of the mesh that it belongs to; `world` for the world's, empty for others
    ranks: tuple[int, ...]  # of the group, in the world
    dtype: str
    payload: int  # bytes
    enqueued: int
    sequence: int = 0  # its number in the group; messages have none
    peer: int | None = None  # of a message, in the world; -1 for a receive from anyone
    wire: int = 0  # bytes
    modelled: bool = False  # whether `wire` is, or a part of it
    transport: str = ""
    algorithm: str = ""
    started: int = 0
    ended: int = 0  # 0 while it is under way
    blocked: int = 0  # nanoseconds in which the caller could do nothing else


class Log(list[Record]):
    """Records in the order of the calls; `steps` are the moments at which an optimizer had made a step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []


_COLUMNS = [field.name for field in fields(Record)]
_NAMES = ("operation", "dtype", "transport", "algorithm")
_STEP = "step"  # stands where an operation's name does; `enqueued` is the moment
_NO_PEER = -2
_INTERVAL = 1.0  # seconds
_SETTLED = 10**9  # nanoseconds after its end in which a record may still change: who waited for it wakes up


class RecordWriter:
    """Writes one rank's records; to be added to as a `Log` is."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = (folder / f"rank-{rank}.rows").open("wb")
        self._file = folder / f"rank-{rank}.json"
        self._header: dict[str, Any] = {"rank": rank, "size": size, "host": socket.gethostname()}
        self._header |= {"columns": _COLUMNS, "names": [], "groups": []}
        self._places: dict[object, int] = {}
        self._added: deque[Record] = deque()
        self._under_way: list[Record] = []
        self.steps: deque[int] = deque()
        self.append = self._added.append
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._write_header()
        threading.Thread(target=self._serve, name="echelon-record", daemon=True).start()

    def flush(self, before: float = math.inf) -> None:
        """Write the records that ended before that moment; without one, all."""
        with self._lock:
            records = self._under_way + [self._added.popleft() for _ in range(len(self._added))]
            self._under_way = [record for record in records if not _is_over(record, before)]
            rows = [self._row(record) for record in records if _is_over(record, before)]
            for _ in range(len(self.steps)):
                rows.append(self._row(Record(_STEP, "", "", (), "", 0, self.steps.popleft())))
            np.array(rows, dtype=np.int64).tofile(self._rows)
            self._rows.flush()

    def close(self) -> None:
        self._closed.set()
        self.flush()

    def _serve(self) -> None:
        while not self._closed.wait(_INTERVAL):
            self.flush(now() - _SETTLED)

    def _row(self, record: Record) -> list[int]:
        group = self._place("groups", (record.group, record.dimension, record.ranks))
        numbers = {"group": group, "dimension": group, "ranks": group}
        numbers |= {name: self._place("names", getattr(record, name)) for name in _NAMES}
        numbers["peer"] = _NO_PEER if record.peer is None else record.peer
        return [numbers[name] if name in numbers else int(getattr(record, name)) for name in _COLUMNS]

    def _place(self, table: str, entry: Any) -> int:
        place = self._places.get((table, entry))
        if place is None:
            place = self._places[table, entry] = len(self._header[table])
            self._header[table].append(entry)
            self._write_header()
        return place

    def _write_header(self) -> None:
        """All at once, and before any row that needs it: whoever reads meanwhile finds the old one or the new one."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._header))
        new.replace(self._file)


def read(folder: Path) -> dict[int, Log]:
    """The ranks' records, from their files."""
    logs = {}
    for file in sorted(folder.glob("rank-*.json")):
        header = json.loads(file.read_text())
        if header["columns"] != _COLUMNS:
            raise ValueError(f"{file} was written by another version of Echelon")
        logs[header["rank"]] = _read_rows(file.with_suffix(".rows"), header)
    return dict(sorted(logs.items()))


def _read_rows(file: Path, header: dict[str, Any]) -> Log:
    log = Log()
    numbers = np.fromfile(file, dtype=np.int64)
    whole = len(numbers) // len(_COLUMNS) * len(_COLUMNS)  # a killed rank may leave a part of a row
    for row in numbers[:whole].reshape(-1, len(_COLUMNS)).tolist():
        values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
        values |= {name: header["names"][values[name]] for name in _NAMES}
        values["group"], values["dimension"], ranks = header["groups"][values["group"]]
        values |= {"ranks": tuple(ranks), "modelled": bool(values["modelled"])}
        values["peer"] = None if values["peer"] == _NO_PEER else values["peer"]
        if values["operation"] == _STEP:
            log.steps.append(values["enqueued"])
        else:
            log.append(Record(**values))
    log.sort(key=lambda record: record.enqueued)
    return log


def _is_over(record: Record, before: float) -> bool:
    return 0 < record.ended < before or before == math.inf
