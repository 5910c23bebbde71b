"""Whether a schedule is whole and in order, as far as one rank alone can tell; deadlocks are found by the simulator.

Every rank computes each of its stages once for each microbatch that comes there, sends and receives what goes between
ranks, takes no step before what it needs, and every gradient ends in an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from echelon.parallel.pipeline.actions import COMPUTATIONS, Action, Kind, Schedule
from echelon.parallel.pipeline.messages import message


class ScheduleError(ValueError):
    """A schedule that cannot run, and where: `index` is None for an action that is missing."""

    def __init__(self, schedule: Schedule, rank: int, index: int | None, action: Action, why: str) -> None:
        place = "" if index is None else f", action {index}"
        super().__init__(f"{schedule.name}: rank {rank}{place}, {action}: {why}")
        self.rank, self.index, self.action = rank, index, action


def check(schedule: Schedule) -> None:
    """Refuse what is missing, repeated, misplaced or out of order."""
    for rank, row in enumerate(schedule.actions):
        walk = _Walk(schedule, rank, dict.fromkeys(_expected(schedule, rank)))
        for index, action in enumerate(row):
            walk.take(index, action)
        walk.end()


@dataclass
class _Walk:
    """Goes through the actions of one rank, and knows what has been done."""

    schedule: Schedule
    rank: int
    expected: dict[Action, None]
    done: dict[Action, int] = field(default_factory=dict)  # what has been done, and the version it used
    gradients: dict[tuple[int, int], Action] = field(default_factory=dict)  # by microbatch and stage: not yet reduced
    reduced: int = -1  # the last microbatch of the last reduce
    updated: int = -1  # and of the last step
    version: int = 0  # the newest
    index: int | None = None

    def take(self, index: int, action: Action) -> None:
        self.index = index
        if action.kind == "reduce":
            self._reduce(action)
        elif action.kind == "step":
            self._step(action)
        else:
            bare = replace(action, version=0) if action.version else action
            self._once(action, bare)
            self._after(action)
            if action.kind in COMPUTATIONS:
                self._versioned(action)
            if action.kind in ("backward", "backward_weight"):
                self.gradients[action.microbatch, action.stage] = action
            self.done[bare] = action.version

    def end(self) -> None:
        self.index = None
        for action in self.expected:
            if action not in self.done:
                self._refuse(action, "is missing")
        for action in self.gradients.values():
            self._refuse(action, "its gradient is never reduced")
        if self.updated < self.reduced:
            missing = Action("step", microbatch=self.reduced, version=self.version + 1)
            self._refuse(missing, "is missing: the gradients are reduced, and then not used")

    def _once(self, action: Action, bare: Action) -> None:
        if bare not in self.expected:
            stages = ", ".join(f"{stage} ({way})" for stage, way in self.schedule.held(self.rank))
            self._refuse(action, f"does not belong here: this rank holds stage {stages}")
        if bare in self.done:
            self._refuse(action, "comes a second time")

    def _after(self, action: Action) -> None:
        for need in _needs(self.schedule, action):
            if need not in self.done:
                self._refuse(action, f"comes before the {need}")

    def _versioned(self, action: Action) -> None:
        if not 0 <= action.version <= self.version:
            self._refuse(action, f"uses version {action.version} of the weights, but the newest is {self.version}")
        used = self.done.get(_same("forward", action), action.version)
        if action.version != used:
            self._refuse(action, f"uses version {action.version} of the weights, but its forward used {used}")

    def _reduce(self, action: Action) -> None:
        due = {
            (microbatch, stage)
            for microbatch in range(self.reduced + 1, action.microbatch + 1)
            for stage, way in self.schedule.held(self.rank)
            if way == self.schedule.direction_of(microbatch)
        }
        if action.microbatch <= self.reduced:
            self._refuse(action, f"the gradients up to microbatch {self.reduced} have been reduced before")
        for microbatch, stage in sorted(due - self.gradients.keys()):
            self._refuse(action, f"comes before the backward of microbatch {microbatch} at stage {stage}")
        for microbatch, stage in sorted(self.gradients.keys() - due):
            self._refuse(action, f"comes after the backward of microbatch {microbatch} at stage {stage}")
        self.gradients.clear()
        self.reduced = action.microbatch

    def _step(self, action: Action) -> None:
        if action.microbatch != self.reduced or self.updated == self.reduced:
            self._refuse(action, "comes before the reduce of its gradients")
        if action.version != self.version + 1:
            self._refuse(action, f"the newest version of the weights is {self.version}")
        if action.version > 1 and not self.schedule.is_versioned:
            self._refuse(action, "is a second update, in a schedule that does not say is_versioned=True")
        self.version, self.updated = action.version, action.microbatch

    def _refuse(self, action: Action, why: str) -> None:
        raise ScheduleError(self.schedule, self.rank, self.index, action, why)


def _expected(schedule: Schedule, rank: int) -> Iterator[Action]:
    """All that a rank has to do, but for updates; with version 0."""
    kinds: list[Kind] = ["forward"]
    if not schedule.is_forward_only:
        kinds += ["backward_input", "backward_weight"] if schedule.splits_backward else ["backward"]
    for microbatch in range(schedule.microbatches):
        way = schedule.direction_of(microbatch)
        for stage in (stage for stage, other in schedule.held(rank) if other == way):
            for kind in kinds:
                action = Action(kind, stage, microbatch, way)
                yield action
                yield from message("receive", schedule, action)
                yield from message("send", schedule, action)


def _needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """What has to stand before an action on its own rank."""
    input_backward: Kind = "backward_input" if schedule.splits_backward else "backward"
    if action.kind == "send":
        yield _same("forward" if action.what == "activation" else input_backward, action)
    if action.kind in ("backward", "backward_input"):
        yield _same("forward", action)
    if action.kind == "backward_weight":
        yield _same("backward_input", action)
    source, received = schedule.source(action), message("receive", schedule, action)
    yield from received
    if source is not None and not received:
        yield Action(action.kind, source, action.microbatch, action.direction)


def _same(kind: Kind, action: Action) -> Action:
    return Action(kind, action.stage, action.microbatch, action.direction)
