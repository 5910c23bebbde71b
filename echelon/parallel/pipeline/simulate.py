"""What a schedule would take: when each rank computes and when it waits, and what it holds at most.

A computation begins when its rank is free and its message is there; a message takes latency + bytes / bandwidth from
when it has been both sent and expected, and messages do not disturb each other. The two ranks of a bidirectional
schedule that hold the same stages reduce together. A schedule that cannot run is refused, with the place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.parallel.pipeline.actions import COMPUTATIONS, MESSAGES, Action, Schedule, What
from echelon.parallel.pipeline.check import ScheduleError, check
from echelon.parallel.pipeline.messages import message

__all__ = ["Costs", "ScheduleError", "Span", "Timeline", "simulate"]


@dataclass(frozen=True)
class Costs:
    """Seconds, or any unit: of a microbatch at a stage, one figure for all stages or one for each; bytes a message."""

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    latency: float = 0.0
    bandwidth: float = math.inf
    activation_bytes: float = 0.0
    reduce: float = 0.0
    step: float = 0.0

    @property
    def message(self) -> float:
        return self.latency + self.activation_bytes / self.bandwidth

    def of(self, action: Action) -> float:
        """What the rank is busy with; a whole backward is both parts."""
        if action.kind == "backward":
            return _at(self.backward_input, action.stage) + _at(self.backward_weight, action.stage)
        if action.kind in MESSAGES:
            return 0.0
        return _at(getattr(self, action.kind), action.stage)


@dataclass(frozen=True, slots=True)
class Span:
    """An action that a rank is busy with, from when to when."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of computations, reduces and steps by rank, and what follows from them.

    `bubble` is the share of all ranks' time in which they wait. `activations` counts microbatches of one stage from
    their forward to the end of their backward, `weights` copies of one stage: versions in use, and both directions.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    bubble: float
    activations: tuple[int, ...]
    weights: tuple[int, ...]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a schedule whose actions cost so much."""
    _check_costs(schedule, costs)
    check(schedule)
    spans = _Run(schedule, costs).spans()
    makespan = max((span.end for row in spans for span in row), default=0.0)
    busy = math.fsum(span.end - span.start for row in spans for span in row)
    bubble = 1 - busy / (schedule.ranks * makespan) if makespan else 0.0
    activations = tuple(_activations(schedule, row) for row in schedule.actions)
    weights = tuple(_weights(schedule, rank) for rank in range(schedule.ranks))
    return Timeline(schedule, spans, makespan, max(bubble, 0.0), activations, weights)


@dataclass
class _Run:
    """Lets each rank go on until it waits for another that has not come so far; over again, until all are through."""

    schedule: Schedule
    costs: Costs
    begun: dict[Action, float] = field(default_factory=dict)  # sends and receives
    reached: dict[tuple[int, int], float] = field(default_factory=dict)  # a reduce, by rank and microbatch

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        rows: list[list[Span]] = [[] for _ in self.schedule.actions]
        places = [0] * self.schedule.ranks
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.schedule.actions):
                begin = places[rank]
                places[rank] = self._go(rank, row, begin, rows[rank])
                moved = moved or places[rank] > begin
        self._refuse_deadlock(places)
        return tuple(map(tuple, rows))

    def _go(self, rank: int, row: Sequence[Action], place: int, spans: list[Span]) -> int:
        """As far as it gets from a place."""
        for index in range(place, len(row)):
            action, now = row[index], spans[-1].end if spans else 0.0
            if action.kind in MESSAGES:
                self.begun[action] = now
                continue
            start = self._start(rank, action, now)
            if start is None:
                return index
            spans.append(Span(action, start, start + self.costs.of(action)))
        return len(row)

    def _start(self, rank: int, action: Action, now: float) -> float | None:
        """When a rank that is free now can begin; None if that is not known yet."""
        if action.kind == "reduce":
            self.reached[rank, action.microbatch] = now
            times = [self.reached.get((other, action.microbatch)) for other in self._partners(rank)]
        else:
            sent = _sent(self.schedule, action)
            received = message("receive", self.schedule, action)
            times = [self._arrival(*sent, *received)] if sent else []
        known = [time for time in times if time is not None]
        return max([now, *known]) if len(known) == len(times) else None

    def _arrival(self, sent: Action, received: Action) -> float | None:
        if sent not in self.begun:
            return None
        return max(self.begun[sent], self.begun[received]) + self.costs.message

    def _partners(self, rank: int) -> set[int]:
        """The ranks that hold the same stages, for another direction."""
        stages = [stage for stage, _ in self.schedule.held(rank)]
        return {self.schedule.rank_of(stage, way) for stage in stages for way in self.schedule.directions} - {rank}

    def _refuse_deadlock(self, places: Sequence[int]) -> None:
        rows = self.schedule.actions
        stuck = [rank for rank, place in enumerate(places) if place < len(rows[rank])]
        if not stuck:
            return
        waits = []
        for rank in stuck:
            action = rows[rank][places[rank]]
            sent = _sent(self.schedule, action)
            waits.append(f"rank {rank} at action {places[rank]} for the {sent[0] if sent else 'other rank to reduce'}")
        why = f"a deadlock: {'; '.join(waits)}"
        raise ScheduleError(self.schedule, stuck[0], places[stuck[0]], rows[stuck[0]][places[stuck[0]]], why)


def _sent(schedule: Schedule, action: Action) -> list[Action]:
    """The other rank's send that a computation waits for; none if it needs none."""
    source = schedule.source(action)
    if source is None or not message("receive", schedule, action):
        return []
    what: What = "activation" if action.kind == "forward" else "gradient"
    return [Action("send", source, action.microbatch, action.direction, what=what)]


def _activations(schedule: Schedule, row: Sequence[Action]) -> int:
    """At most held. Where there is no backward, only while a forward runs."""
    if schedule.is_forward_only:
        return int(bool(row))
    held = peak = 0
    for action in row:
        held += action.kind == "forward"
        peak = max(peak, held)
        held -= action.kind in ("backward", "backward_weight")
    return peak


def _weights(schedule: Schedule, rank: int) -> int:
    """At most held: the newest version of each stage, and older ones until their last use."""
    row = schedule.actions[rank]
    last = {(a.stage, a.version): index for index, a in enumerate(row) if a.kind in COMPUTATIONS}
    newest, stages = 0, {stage for stage, _ in schedule.held(rank)}  # a stage that goes both ways is one
    alive = {(stage, 0) for stage in stages}
    peak = len(alive)
    for index, action in enumerate(row):
        if action.kind == "step":
            newest = action.version
            alive |= {(stage, newest) for stage in stages}
        alive = {copy for copy in alive if copy[1] == newest or last.get(copy, -1) > index}
        peak = max(peak, len(alive))
    return peak


def _check_costs(schedule: Schedule, costs: Costs) -> None:
    for name in ("forward", "backward_input", "backward_weight", "latency", "activation_bytes", "reduce", "step"):
        cost = getattr(costs, name)
        each = cost if isinstance(cost, Sequence) else [cost] * schedule.stages
        if len(each) != schedule.stages:
            raise ValueError(
                f"{schedule.name} has {schedule.stages} stages, but {name} has {len(each)} costs: "
                "give one for each stage, or a single one for all"
            )
        if not all(0 <= one < math.inf for one in each):
            raise ValueError(f"{name} costs {cost}: choose 0 or more")
    if not costs.bandwidth > 0:
        raise ValueError(f"a bandwidth of {costs.bandwidth} carries nothing: choose more than 0")


def _at(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost
