"""Schedules by name: for each rank the ordered actions of one pipeline step, as plain data.

    schedule = make("chimera", ranks=4, microbatches=8)
    schedule.actions[0]     # what rank 0 does: forward, send, receive, backward, …, reduce, step

The simulator, the drawings and the runtime read the same data, and nothing of it is computed while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from echelon.parallel.pipeline import orders
from echelon.parallel.pipeline.actions import (
    BACKWARDS,
    COMPUTATIONS,
    MESSAGES,
    Action,
    Direction,
    Kind,
    Schedule,
    What,
)
from echelon.parallel.pipeline.messages import with_messages

__all__ = [
    "BACKWARDS",
    "COMPUTATIONS",
    "MESSAGES",
    "SCHEDULES",
    "Action",
    "Direction",
    "Kind",
    "Schedule",
    "What",
    "forward_only",
    "make",
]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": orders.gpipe,
    "1f1b": orders.one_forward_one_backward,
    "interleaved": orders.interleaved,
    "zero-bubble": orders.zero_bubble,
    "gems": orders.gems,
    "gems-gpipe": orders.gems_gpipe,
    "chimera": orders.chimera,
    "pipedream": orders.pipedream,
    "pipedream-2bw": orders.pipedream_2bw,
}
_WHOLE = {
    "interleaved": "they go through the chunks in groups of as many as ranks",
    "pipedream-2bw": "weights are updated after each so many",
}


def make(name: str, ranks: int, microbatches: int, *, chunks: int = 1) -> Schedule:
    """The schedule of this name, with one stage a rank (interleaved: `chunks`); each computes all microbatches."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}: there are {', '.join(SCHEDULES)}")
    for what, count in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if count < 1:
            raise ValueError(f"{name} with {what}={count}: choose 1 or more")
    if name == "chimera" and ranks % 2:
        raise ValueError(
            f"{name} needs an even number of ranks, half for the first stages of each direction, but has {ranks}: "
            f"choose {ranks - 1 or 2} or {ranks + 1 if ranks > 1 else 4}, or a schedule of one direction such as 1f1b"
        )
    if name in _WHOLE and microbatches % ranks:
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        raise ValueError(
            f"{name} on {ranks} ranks needs a multiple of {ranks} microbatches, for {_WHOLE[name]}, but has "
            f"{microbatches}: choose {f'{below} or ' if below else ''}{above}"
        )
    if name == "interleaved":
        if chunks == 1:
            raise ValueError("interleaved has several chunks a rank: choose chunks=2 or more, or 1f1b")
        return orders.interleaved(ranks, microbatches, chunks)
    if chunks > 1:
        raise ValueError(f"{name} has one stage a rank, but chunks={chunks}: leave chunks out, or choose interleaved")
    return SCHEDULES[name](ranks, microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """The same forwards in the same order, with the weights as they are: for evaluation and inference."""
    rows = [[replace(action, version=0) for action in row if action.kind == "forward"] for row in schedule.actions]
    return with_messages(
        schedule.name, rows, schedule.microbatches, chunks=schedule.chunks, directions=schedule.directions
    )
