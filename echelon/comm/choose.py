"""`echelon.comm.route`: the roads of a group's operations, chosen in a script."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from echelon.comm.routes import Road, roads_for


class Chosen:
    """A choice in force. As a context, it ends with the block, and what held before holds again."""

    def __init__(self, group: Any, before: Mapping[str, Road]) -> None:
        self._group, self._before = group, before

    def __enter__(self) -> Chosen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.restore_roads(self._before)


def route(group: Any = None, road: str = "", /, **operations: str) -> Chosen:
    """Choose the roads of a group's operations: `route(group, all_reduce="gloo", all_gather="mpi+ring")`.

    `route(group, "gloo")` is for all operations; single ones may be named beside it; without any, the table holds
    again. The choice belongs to the group (by default the world's) and holds for calls from any thread, until the
    next one, or to the end of the block in `with route(…):`. All ranks of the group call it, at the same place among
    their operations of that group; that they chose the same is checked.
    """
    import torch.distributed as dist

    roads = roads_for(road, operations)
    actual = dist.group.WORLD if group is None else group
    return choose(actual, {**getattr(actual, "chosen_roads", {}), **roads} if roads else {})


def choose(group: Any, roads: Mapping[str, Road]) -> Chosen:
    """These roads for these operations, and those of the table for all others."""
    if not hasattr(group, "choose_roads"):
        raise TypeError(f"only groups of the backend 'echelon' have roads, and this is a {type(group).__name__}")
    return Chosen(group, group.choose_roads(roads))
