"""What of a model a rank of a pipeline has, how often it computes it, what it holds and sends: from the schedule.

Each microbatch's stream goes on to the next stage and its gradient back, a skip straight to where it is taken. Shapes
are those that the model has on the meta device. Not counted: the shapes themselves, told in the first step with
arguments of new shapes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.models.chain import Edge, Given, Linked, Value
from echelon.parallel.pipeline.actions import BACKWARDS, Schedule
from echelon.parallel.pipeline.mail import parts_of
from echelon.parallel.pipeline.simulate import Costs, simulate
from echelon.parallel.pipeline.statistics import norms_of


@dataclass(frozen=True)
class StagePasses:
    """One stage of a rank, and how many microbatches go through it."""

    names: list[str]  # of its parameters
    attentions: list[Any]
    norms: list[Any]
    starts: bool
    ends: bool
    count: int


class Part:
    """A rank's part of a model, with the rank's actions; without a schedule all of it, once.

    `whole` is on the meta device, and stays as it is.
    """

    def __init__(
        self, whole: Linked, spans: Sequence[range] = (), schedule: Schedule | None = None, rank: int = 0
    ) -> None:
        self._spans, self._schedule, self._rank = spans, schedule, rank
        if schedule is None:
            self.model, self.microbatches = whole, 1
            names = [name for name, _ in whole.named_parameters()]
            self.passes = [StagePasses(names, _attentions(whole), [*norms_of(whole).values()], True, True, 1)]
            self.reductions = self.updates = 1
            self.is_bidirectional = self.is_versioned = False
            self.holders = 1  # ranks of the pipeline that hold the same stages
            return
        self.model, self.microbatches = copy.deepcopy(whole), schedule.microbatches
        self.model.keep([[spans[stage] for stage, _ in schedule.held(each)] for each in range(schedule.ranks)], rank)
        kinds = Counter(action.kind for action in schedule.actions[rank])
        self._forwards = Counter(
            (action.stage, action.direction) for action in schedule.actions[rank] if action.kind == "forward"
        )
        self.passes = [self._passes(stage, count) for (stage, _), count in self._forwards.items()]
        self.reductions = 1 if schedule.splits_backward else kinds["backward"]  # of gradients that are not kept whole
        self.updates = kinds["reduce"]
        self.is_bidirectional, self.is_versioned = schedule.is_bidirectional, schedule.is_versioned
        self.holders = 2 if schedule.is_bidirectional and 2 * rank != schedule.ranks - 1 else 1

    def messages(self, whole: Linked, example: Given | None, dtype: torch.dtype) -> int:
        """Bytes that the rank sends to other stages, for microbatches like the example."""
        assert self._schedule is not None
        if example is None:
            raise ValueError("what a pipeline sends depends on its microbatches: give an example of one")
        values = _edge_values(copy.deepcopy(whole).to(dtype).eval(), self._spans, _in_dtype(example, dtype))
        stage_of = {link: stage for stage, span in enumerate(self._spans) for link in span}
        total = 0
        for (stage, direction), count in self._forwards.items():
            into, out = whole.crossing(self._spans[stage])
            for edge, link, back in [(edge, edge[1], False) for edge in out] + [(edge, edge[0], True) for edge in into]:
                if self._schedule.rank_of(stage_of[link], direction) != self._rank:
                    tensors = [x for x in parts_of(values[edge]) if x.requires_grad or not back]
                    total += count * sum(x.numel() * x.element_size() for x in tensors)
        return total

    def statistics(self, element_size: int) -> int:
        """Bytes that a rank of a bidirectional schedule tells its twin of what its batch normalisations have seen."""
        if self.holders == 1:
            return 0
        seen: int = sum(passes.count * norm.num_features for passes in self.passes for norm in passes.norms)
        return 2 * seen * element_size

    def in_flight(self) -> int:
        """Blocks whose activations are held at the most, each once for every microbatch under way."""
        if self._schedule is None:
            return len(self.passes[0].attentions)
        blocks = {stage: len(passes.attentions) for (stage, _), passes in zip(self._forwards, self.passes, strict=True)}
        held = most = 0
        for action in self._schedule.actions[self._rank]:
            if action.kind == "forward":
                held += blocks[action.stage]
                most = max(most, held)
            elif action.kind in ("backward", "backward_weight"):
                held -= blocks[action.stage]
        return most

    def versions(self) -> int:
        """Copies of its weights at the most."""
        if self._schedule is None or not self.is_versioned:
            return 1
        return simulate(self._schedule, Costs()).weights[self._rank]

    @property
    def keeps_gradients(self) -> bool:
        """Whether they are whole until the end of a step."""
        return self._schedule is not None and (self._schedule.splits_backward or self.is_bidirectional)

    def gatherings(self, units: Iterable[str]) -> dict[str, int] | None:
        """How often stage 3 gathers each unit: a block for each of its passes, forward and backward; the rest stays
        whole from a pass on until a backward pass has ended.
        """
        if self._schedule is None:
            return None
        stages = {stage for stage, _ in self._forwards}
        parts = {stage: [name for link in self._spans[stage] for name in self.model.parts(link)] for stage in stages}
        found = {
            unit: 2
            * sum(
                count
                for (stage, _), count in self._forwards.items()
                if any(_overlap(unit, name) for name in parts[stage])
            )
            for unit in units
        }
        rest, is_whole = 0, False
        for action in self._schedule.actions[self._rank]:
            if action.kind in ("forward", "backward", "backward_input"):
                rest += not is_whole
                is_whole = action.kind not in BACKWARDS
        return found | {"": rest}

    def _passes(self, stage: int, count: int) -> StagePasses:
        of_stage = [name for link in self._spans[stage] for name in self.model.parts(link)]
        modules = dict(self.model.named_modules())
        parts = [modules[name] for name in of_stage if name in modules]
        return StagePasses(
            [name for name, _ in self.model.named_parameters() if any(_overlap(name, part) for part in of_stage)],
            [each for part in parts for each in _attentions(part)],
            [each for part in parts for each in norms_of(part).values()],
            stage == 0,
            stage == len(self._spans) - 1,
            count,
        )


def _edge_values(chain: Linked, spans: Sequence[range], example: Given) -> dict[Edge, Value]:
    """What goes from stage to stage."""
    values: dict[Edge, Value] = {}
    for span in spans[:-1]:
        into, _ = chain.crossing(span)
        values |= chain.compute(span, example, {edge: values[edge] for edge in into})
    return values


def _in_dtype(example: Given, dtype: torch.dtype) -> Given:
    def moved(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(example, Mapping):
        return {name: moved(value) for name, value in example.items()}
    return [moved(value) for value in example]


def _attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "attend")]


def _overlap(unit: str, part: str) -> bool:
    """Whether one is inside the other."""
    return unit == part or unit.startswith(f"{part}.") or part.startswith(f"{unit}.")
