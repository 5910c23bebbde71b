"""Who computes a stage: one rank, or, where it works on tiles of images, a crew with one rank for each.

A schedule is made for places, one for each stage of a rank; each rank of a crew takes the actions of its place. The
crews that go up are those that go down, mirrored: what rank r of n has in one direction, rank n - 1 - r has in the
other. So crews of different sizes overlap, and a rank may belong to those of two places, or to two of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from echelon.parallel.pipeline.actions import Action, Direction, Schedule
from echelon.parallel.pipeline.messages import woven

Tiles = tuple[int, int]  # rows and columns


@dataclass(frozen=True)
class Crew:
    """Ranks of a pipeline, one for each tile, row by row."""

    ranks: tuple[int, ...]
    tiles: Tiles = (1, 1)


@dataclass(frozen=True)
class Crews:
    """Of each place, as many as its images have tiles."""

    tiles: tuple[Tiles, ...]

    @staticmethod
    def alone(places: int) -> Crews:
        """One rank each."""
        return Crews(((1, 1),) * places)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(each) for each in self.tiles)

    @property
    def ranks(self) -> int:
        return sum(self.sizes)

    def crew(self, stage: int, direction: Direction = "down") -> Crew:
        """Of a stage."""
        place = stage % len(self.sizes)
        first = sum(self.sizes[:place])
        ranks = range(first, first + self.sizes[place])
        if direction == "up":
            ranks = range(self.ranks - ranks.stop, self.ranks - ranks.start)
        return Crew(tuple(ranks), self.tiles[place])

    def place(self, rank: int, direction: Direction = "down") -> int:
        """Of a rank that goes a way."""
        return next(place for place in range(len(self.sizes)) if rank in self.crew(place, direction).ranks)

    def held(self, schedule: Schedule, rank: int) -> tuple[tuple[int, Direction], ...]:
        """The stages of a rank, each with its direction."""
        return tuple(
            (stage, direction)
            for direction in schedule.directions
            for stage in range(schedule.stages)
            if rank in self.crew(stage, direction).ranks
        )

    def actions(self, schedule: Schedule, rank: int) -> tuple[Action, ...]:
        """What a rank does. In both directions the computations of all ranks must stand in one order, unless each
        place has one rank: then this order is taken with the rank's own stages.
        """
        place = self.place(rank)
        if not schedule.is_bidirectional or self.ranks == len(self.sizes):
            return schedule.actions[place]
        self.check(schedule)
        own = {direction: self.place(rank, direction) for direction in schedule.directions}
        row = [replace(each, stage=own[each.direction]) if each.stage >= 0 else each for each in _bare(schedule, 0)]
        return woven(schedule, row)

    def check(self, schedule: Schedule) -> None:
        """Whether such crews can follow a schedule."""
        orders = {tuple(_order(_bare(schedule, place))) for place in range(schedule.ranks)}
        if self.ranks > len(self.sizes) and schedule.is_bidirectional and len(orders) > 1:
            raise ValueError(
                f"{schedule.name} has each rank compute in an order of its own, which ranks that belong to two stages "
                "of different sizes cannot follow: use gems or gems-gpipe"
            )


def held(schedule: Schedule, spans: Sequence[range], crews: Crews | None = None) -> list[list[range]]:
    """The spans of links that each rank of a pipeline holds."""
    crews = crews or Crews.alone(schedule.ranks)
    return [
        [spans[stage] for stage in dict.fromkeys(stage for stage, _ in crews.held(schedule, rank))]
        for rank in range(crews.ranks)
    ]


def holders(schedule: Schedule, crews: Crews, stage: int) -> list[int]:
    """The ranks of a pipeline that hold a stage."""
    return sorted(set(itertools.chain(*(crews.crew(stage, way).ranks for way in schedule.directions))))


def _bare(schedule: Schedule, place: int) -> list[Action]:
    return [each for each in schedule.actions[place] if each.kind not in ("send", "receive")]


def _order(actions: Sequence[Action]) -> list[tuple[str, int]]:
    return [(each.kind, each.microbatch) for each in actions]
