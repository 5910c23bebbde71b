"""From records to figures: a line for each dimension, operation and size class, and the traffic between ranks.

Counts, bytes and times of a line are those of one rank, on average over the ranks that took part in it. Bandwidths are
nccl-tests': `algbw` is payload over time, `busbw` that times what a ring sends for each byte of the payload, on the
size of the operation's own group, so that it can be held against a link's speed whatever the operation and the group.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.comm.records import Log, Record

_CLASSES = ((2**12, "≤ 4 KiB"), (2**16, "≤ 64 KiB"), (2**20, "≤ 1 MiB"), (2**24, "≤ 16 MiB"), (2**63, "> 16 MiB"))
_TWICE = ("all_reduce", "all_reduce_coalesced")
_ONCE = (
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
)


@dataclass(frozen=True, slots=True)
class Line:
    """What one rank did, on average; times in seconds, bandwidths in bytes a second."""

    dimension: str
    operation: str
    size_class: str
    count: float
    payload: float
    wire: float
    modelled: bool
    time: float
    algbw: float
    busbw: float
    share: float  # of the time of a step, or of the whole record if no optimizer made steps
    blocked: float
    slowest: int | None  # the rank that most delayed the others by calling last
    delay: float  # by how much, a call


@dataclass(frozen=True, slots=True)
class Summary:
    """All lines, and what they are of."""

    ranks: int
    steps: int
    seconds: float  # that `share` is of
    lines: list[Line]


def summarise(logs: dict[int, Log]) -> Summary:
    begin, end, steps = _window(logs)
    lines: dict[tuple[str, str, int], list[tuple[int, Record]]] = defaultdict(list)
    for rank, log in logs.items():
        for record in log:
            if record.ended and record.operation != "receive":
                lines[_dimension(record), record.operation, _size_class(record.payload)].append((rank, record))
    seconds = (end - begin) / 1e9
    return Summary(len(logs), steps, seconds, [_line(key, lines[key], begin, end) for key in sorted(lines)])


def traffic(logs: dict[int, Log]) -> NDArray[np.int64]:
    """Bytes from each rank (row) to each (column).

    A message's are known. A collective's go to the next rank of the group, as in a ring, if they are modelled, and to
    all others alike if not.
    """
    size = 1 + max([*logs, *(rank for log in logs.values() for record in log for rank in record.ranks)], default=0)
    matrix = np.zeros((size, size), dtype=np.int64)
    for rank, log in logs.items():
        for record in log:
            if record.operation == "send" and record.peer is not None:
                matrix[rank, record.peer] += record.wire
            elif record.wire and record.modelled:
                matrix[rank, record.ranks[(record.ranks.index(rank) + 1) % len(record.ranks)]] += record.wire
            elif record.wire:
                for other in record.ranks:
                    if other != rank:
                        matrix[rank, other] += record.wire // (len(record.ranks) - 1)
    return matrix


def by_dimension(logs: dict[int, Log]) -> dict[str, dict[str, int]]:
    """Wire bytes of all ranks, by dimension and operation."""
    total: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for log in logs.values():
        for record in log:
            if record.wire:
                total[_dimension(record)][record.operation] += record.wire
    return {dimension: dict(operations) for dimension, operations in sorted(total.items())}


def bus_factor(operation: str, size: int) -> float:
    """Bytes that a ring sends a rank for each byte of payload."""
    if operation in _TWICE:
        return 2 * (size - 1) / size
    return (size - 1) / size if operation in _ONCE else 1.0


def _line(key: tuple[str, str, int], found: list[tuple[int, Record]], begin: int, end: int) -> Line:
    dimension, operation, size_class = key
    ranks = len({rank for rank, _ in found})
    records = [record for _, record in found]
    payload, wire = (sum(getattr(record, name) for record in records) / ranks for name in ("payload", "wire"))
    time = sum(record.ended - record.started for record in records) / ranks / 1e9
    on_the_bus = sum(record.payload * bus_factor(operation, len(record.ranks)) for record in records) / ranks
    inside = sum(record.ended - record.started for record in records if begin <= record.enqueued < end) / ranks
    slowest, delay = _slowest(found)
    return Line(
        dimension,
        operation,
        _CLASSES[size_class][1] if payload else "",
        len(records) / ranks,
        payload,
        wire,
        any(record.modelled for record in records),
        time,
        payload / time if time else 0.0,
        on_the_bus / time if time else 0.0,
        inside / (end - begin) if end > begin else 0.0,
        sum(record.blocked for record in records) / ranks / 1e9,
        slowest,
        delay,
    )


def _slowest(found: list[tuple[int, Record]]) -> tuple[int | None, float]:
    """Of the collectives that several ranks recorded: who came last, and how long after the one before, on average."""
    calls: dict[tuple[str, tuple[int, ...], int], list[tuple[int, int]]] = defaultdict(list)
    for rank, record in found:
        if record.sequence:
            calls[record.group, record.ranks, record.sequence].append((record.enqueued, rank))
    delays: dict[int, list[int]] = defaultdict(list)
    for arrivals in calls.values():
        if len(arrivals) > 1:
            (before, _), (last, rank) = sorted(arrivals)[-2:]
            delays[rank].append(last - before)
    if not delays:
        return None, 0.0
    slowest = max(delays, key=lambda rank: sum(delays[rank]))
    return slowest, sum(delays[slowest]) / len(delays[slowest]) / 1e9


def _window(logs: dict[int, Log]) -> tuple[int, int, int]:
    """From the first step's end to the last's, where there were at least two; else the whole record."""
    steps = max((log.steps for log in logs.values()), key=len, default=[])
    if len(steps) > 1:
        return steps[0], steps[-1], len(steps)
    times = [time for log in logs.values() for record in log for time in (record.enqueued, record.ended) if time]
    return min(times, default=0), max(times, default=0), len(steps)


def _dimension(record: Record) -> str:
    return record.dimension or "other"


def _size_class(payload: int) -> int:
    return next(number for number, (limit, _) in enumerate(_CLASSES) if payload <= limit)
