"""What a schedule is made of: for each rank, its actions in order.

Stages are counted through the model. A pipeline that goes down has stage s on rank s (with several chunks, on rank
s modulo ranks); one that goes up has its first stage on the last rank. A bidirectional schedule has both, so each stage
twice, and deals the microbatches to them in turn. An activation goes from stage s to s + 1, a gradient to s - 1.
`receive` and `send` begin a message and never wait: the computation that needs what comes does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["forward", "backward", "backward_input", "backward_weight", "send", "receive", "reduce", "step"]
Direction = Literal["down", "up"]
What = Literal["activation", "gradient"]

BACKWARDS: tuple[Kind, ...] = ("backward", "backward_input", "backward_weight")
COMPUTATIONS: tuple[Kind, ...] = ("forward", *BACKWARDS)
MESSAGES: tuple[Kind, ...] = ("send", "receive")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does. `backward` is for input and weights together; split schedules have the two parts.

    `reduce` sums the gradients over a stage's copies, and `step` updates: both for all stages of the rank, with the
    gradients up to `microbatch`. `version` counts updates: that of the weights used, of a step that of what it makes.
    """

    kind: Kind
    stage: int = -1
    microbatch: int = -1
    direction: Direction = "down"
    version: int = 0
    what: What | None = None

    def __str__(self) -> str:
        name = self.kind.replace("_", " ")
        if self.kind in ("reduce", "step"):
            makes = f", which makes version {self.version}" if self.kind == "step" else ""
            return f"{name} after microbatch {self.microbatch}{makes}"
        of = f" of the {self.what}" if self.what else ""
        return f"{name}{of} of microbatch {self.microbatch} at stage {self.stage} ({self.direction})"


@dataclass(frozen=True)
class Schedule:
    """The actions of one step of training, by rank; of versioned schedules, of a window of many steps.

    `is_versioned`: weights are updated by the schedule itself, while microbatches are under way (if there are enough).
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    directions: tuple[Direction, ...] = ("down",)
    is_versioned: bool = False

    def __post_init__(self) -> None:
        if len(self.actions) != self.ranks:
            raise ValueError(f"{self.name} has {self.ranks} ranks, but rows of actions for {len(self.actions)}")

    @cached_property
    def updates(self) -> tuple[range, ...]:
        """The microbatches whose gradients each update takes."""
        ends = [action.microbatch + 1 for action in self.actions[0] if action.kind == "step"]
        return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))

    @property
    def chunks(self) -> int:
        """Stages of a rank in one direction."""
        return self.stages // self.ranks

    @property
    def is_bidirectional(self) -> bool:
        return len(self.directions) > 1

    @cached_property
    def splits_backward(self) -> bool:
        return self._has("backward_input", "backward_weight")

    @cached_property
    def is_forward_only(self) -> bool:
        return not self._has(*BACKWARDS)

    def rank_of(self, stage: int, direction: Direction = "down") -> int:
        """Where a stage lies."""
        return stage % self.ranks if direction == "down" else self.ranks - 1 - stage % self.ranks

    def held(self, rank: int) -> tuple[tuple[int, Direction], ...]:
        """The stages of a rank, each with its direction."""
        return tuple(
            (stage, direction)
            for direction in self.directions
            for stage in range(self.stages)
            if self.rank_of(stage, direction) == rank
        )

    def direction_of(self, microbatch: int) -> Direction:
        """Which way a microbatch goes."""
        return self.directions[microbatch % len(self.directions)]

    def source(self, action: Action) -> int | None:
        """The stage whose output a computation takes; None where it is the batch, the loss or this rank's own."""
        if action.kind == "forward":
            return action.stage - 1 if action.stage > 0 else None
        if action.kind in ("backward", "backward_input"):
            return action.stage + 1 if action.stage < self.stages - 1 else None
        return None

    def target(self, action: Action) -> int | None:
        """The stage that takes a computation's output; None where there is none."""
        if action.kind == "forward":
            return action.stage + 1 if action.stage < self.stages - 1 else None
        if action.kind in ("backward", "backward_input"):
            return action.stage - 1 if action.stage > 0 else None
        return None

    def peer(self, message: Action) -> int:
        """The other rank of a send or receive."""
        forth = (message.what == "activation") == (message.kind == "send")
        return self.rank_of(message.stage + (1 if forth else -1), message.direction)

    def _has(self, *kinds: Kind) -> bool:
        return any(action.kind in kinds for row in self.actions for action in row)
