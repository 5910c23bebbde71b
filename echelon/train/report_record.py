"""The part of a run's report that comes from its record: traffic by dimension, and one step as a timeline."""

from __future__ import annotations

import itertools
from pathlib import Path

from echelon.comm.records import Log, Record
from echelon.comm.records import read as read_record
from echelon.trace.summary import Line, by_dimension, summarise
from echelon.trace.units import show_bytes, show_seconds
from echelon.train.charts import Bar, Span, bar_chart, legend, timeline
from echelon.train.page import note, section, table

_RANKS = 8  # in a timeline


def read_logs(folder: Path) -> tuple[dict[int, Log], str]:
    """The recorded steps, or why there are none."""
    try:
        logs = read_record(folder)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return {}, f"The record cannot be read: {error}"
    return logs, "" if logs else "No steps were recorded: [record] says which, and the run may have ended before."


def communication(logs: dict[int, Log], problem: str) -> str:
    title = "Communication, by dimension"
    if problem:
        return section(title, note(problem))
    summary, sent = summarise(logs), by_dimension(logs)
    if not summary.lines:
        return section(title, note("Nothing was communicated in the steps that were recorded."))
    operations = sorted({operation for parts in sent.values() for operation in parts})
    bars = [
        Bar(
            dimension,
            [(name, parts[name] / len(logs), operations.index(name)) for name in operations if name in parts],
        )
        for dimension, parts in sent.items()
    ]
    told = f"{summary.ranks} ranks, {summary.steps} steps; figures of one rank in all of them; ~ modelled as a ring."
    names = "dimension, operation, size, count, payload, wire, time, busbw, of step, blocked, slowest"
    drawn = [legend([(name, number) for number, name in enumerate(operations)]), bar_chart(bars, show_bytes)]
    lines = [_line(line) for line in summary.lines]
    return section(title, note(told), *(drawn if operations else []), table(names.split(", "), lines, left=3))


def _line(line: Line) -> list[str]:
    return [
        line.dimension,
        line.operation,
        line.size_class,
        f"{line.count:,.10g}",
        show_bytes(line.payload),
        f"{'~' if line.modelled else ''}{show_bytes(line.wire)}",
        show_seconds(line.time),
        f"{show_bytes(line.busbw)}/s" if line.busbw else "",
        f"{line.share:.1%}",
        show_seconds(line.blocked),
        "" if line.slowest is None else f"{line.slowest} (+{show_seconds(line.delay)})",
    ]


def one_step(logs: dict[int, Log]) -> str:
    title = "Timeline of one step"
    window = _window(logs)
    if window is None:
        return section(title, note("There is none: it needs the record of a step."))
    begin, end = window
    inside = {
        rank: [each for each in log if each.ended and each.enqueued < end and each.ended > begin]
        for rank, log in logs.items()
    }
    shown = sorted(inside)[:_RANKS]
    lanes = [
        (rank, dimension) for rank in shown for dimension in sorted({_dimension(each) for each in inside[rank]}) or [""]
    ]
    dimensions = sorted({_dimension(each) for rank in shown for each in inside[rank]})
    spans = [
        _span(each, lanes.index((rank, _dimension(each))), dimensions.index(_dimension(each)), begin, end)
        for rank in shown
        for each in inside[rank]
    ]
    left_out = f" Ranks 0 to {_RANKS - 1} of {len(logs)} are shown." if len(logs) > _RANKS else ""
    told = (
        f"{show_seconds((end - begin) / 1e9)}, of median length among those recorded. Pale: in the background; solid: "
        f"the rank was blocked; gap: it computed.{left_out}"
    )
    drawn = timeline([f"rank {rank}  {name}" for rank, name in lanes], spans, (end - begin) / 1e9, show_seconds)
    return section(title, note(told), legend([(name, number) for number, name in enumerate(dimensions)]), drawn)


def _window(logs: dict[int, Log]) -> tuple[int, int] | None:
    """The step of median length, from one optimizer's step to the next, by the first rank's clock."""
    first = logs[min(logs)] if logs else Log()
    steps = sorted(first.steps)
    if len(steps) > 1:
        pairs = sorted(itertools.pairwise(steps), key=lambda pair: pair[1] - pair[0])
        return pairs[len(pairs) // 2]
    ended = [record.ended for record in first if record.ended]
    return (min(record.enqueued for record in first), max([*ended, *steps])) if ended else None


def _span(record: Record, lane: int, number: int, begin: int, end: int) -> Span:
    first, last = max(record.started, begin), min(record.ended, end)
    blocked = min(record.blocked, record.ended - record.started)
    solid = max(blocked - (record.ended - last), 0)
    title = (
        f"{record.operation} ({_dimension(record)}), {show_bytes(record.payload)} {record.dtype}: "
        f"{show_seconds((record.ended - record.started) / 1e9)}, blocked {show_seconds(record.blocked / 1e9)}"
    )
    return Span(lane, (first - begin) / 1e9, (last - begin) / 1e9, solid / 1e9, number, title)


def _dimension(record: Record) -> str:
    return record.dimension or "other"
