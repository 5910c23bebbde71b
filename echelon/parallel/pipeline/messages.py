"""Messages put between computations: what a stage on another rank needs is sent and received.

A send stands right after its computation. A receive stands one computation ahead of the one that needs it, so that the
message travels while the rank computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from echelon.parallel.pipeline.actions import COMPUTATIONS, Action, Direction, Kind, Schedule, What


def with_messages(
    name: str,
    rows: Sequence[Sequence[Action]],
    microbatches: int,
    *,
    chunks: int = 1,
    directions: tuple[Direction, ...] = ("down",),
    is_versioned: bool = False,
) -> Schedule:
    """The schedule whose ranks compute in the order of these rows."""
    ranks = len(rows)
    bare = Schedule(name, ranks, ranks * chunks, microbatches, tuple(map(tuple, rows)), directions)
    actions = tuple(woven(bare, row) for row in bare.actions)
    return Schedule(name, ranks, bare.stages, microbatches, actions, directions, is_versioned)


def woven(schedule: Schedule, row: Sequence[Action]) -> tuple[Action, ...]:
    """A rank's computations and updates, with their messages."""
    computations = [place for place, action in enumerate(row) if action.kind in COMPUTATIONS]
    ahead = dict(itertools.pairwise(computations))
    found: list[Action] = []
    for place, action in enumerate(row):
        if computations and place == computations[0]:
            found += message("receive", schedule, action)
        if place in ahead:
            found += message("receive", schedule, row[ahead[place]])
        found += [action, *message("send", schedule, action)]
    return tuple(found)


def message(kind: Kind, schedule: Schedule, action: Action) -> list[Action]:
    """What a computation sends or receives: one message, or none if there is nothing or the other stage is here."""
    other = schedule.source(action) if kind == "receive" else schedule.target(action)
    way = action.direction
    if other is None or schedule.rank_of(other, way) == schedule.rank_of(action.stage, way):
        return []
    what: What = "activation" if action.kind == "forward" else "gradient"
    return [Action(kind, action.stage, action.microbatch, way, what=what)]
