"""Records as a timeline that Perfetto (ui.perfetto.dev) and Chrome open: one track a rank, a row a group in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from echelon.comm.records import Log


def timeline(logs: dict[int, Log]) -> dict[str, Any]:
    """In Chrome's trace-event format; times in microseconds from the first call."""
    origin = min((record.enqueued for log in logs.values() for record in log), default=0)
    return {"traceEvents": [event for rank, log in logs.items() for event in _events(rank, log, origin)]}


def _events(rank: int, log: Log, origin: int) -> Iterator[dict[str, Any]]:
    def moment(time: int) -> float:
        return (time - origin) / 1e3

    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    rows: dict[str, int] = {}
    for record in log:
        label = f"{record.dimension or 'group ' + record.group}{', messages' if record.peer is not None else ''}"
        if label not in rows:
            rows[label] = len(rows) + 1
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": rows[label], "args": {"name": label}}
        if not record.ended:
            continue
        event = {"name": record.operation, "cat": record.dimension or "other", "pid": rank, "tid": rows[label]}
        details = {name: getattr(record, name) for name in ("sequence", "dtype", "payload", "wire", "modelled")}
        details |= {"transport": record.transport, "algorithm": record.algorithm, "ranks": str(record.ranks)}
        details |= {"enqueued µs": moment(record.enqueued), "blocked µs": record.blocked / 1e3}
        if record.peer is not None:
            details["peer"] = record.peer
        duration = (record.ended - record.started) / 1e3
        if record.peer is None:
            yield event | {"ph": "X", "ts": moment(record.started), "dur": duration, "args": details}
        else:  # messages overlap each other, which only asynchronous events may
            same = {"id": f"{rank}-{record.enqueued}"}
            yield event | same | {"ph": "b", "ts": moment(record.started), "args": details}
            yield event | same | {"ph": "e", "ts": moment(record.ended)}
    for number, step in enumerate(log.steps, 1):
        yield {"ph": "i", "s": "p", "name": f"step {number}", "pid": rank, "tid": 0, "ts": moment(step)}
