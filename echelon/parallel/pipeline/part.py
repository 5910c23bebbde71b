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
from echelon.parallel.pipeline.actions import BACKWARDS, Direction, Schedule
from echelon.parallel.pipeline.crews import Crew, Crews, held, holders
from echelon.parallel.pipeline.mail import Kinds, Route, kinds_of
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
        self,
        whole: Linked,
        spans: Sequence[range] = (),
        schedule: Schedule | None = None,
        rank: int = 0,
        crews: Crews | None = None,
    ) -> None:
        self.spans, self._schedule, self._rank = spans, schedule, rank
        if schedule is None:
            self.model, self.microbatches = whole, 1
            names = [name for name, _ in whole.named_parameters()]
            self.passes = [StagePasses(names, _attentions(whole), [*norms_of(whole).values()], True, True, 1)]
            self.forwards: Counter[tuple[int, Direction]] = Counter([(0, "down")])
            self.reductions = self.updates = 1
            self.is_bidirectional = self.is_versioned = False
            self.holders = 1  # ranks of the pipeline that hold the same stages
            return
        self.model, self.microbatches = copy.deepcopy(whole), schedule.microbatches
        self.crews = crews or Crews.alone(schedule.ranks)
        self.model.keep(held(schedule, spans, self.crews), rank)
        self._actions = self.crews.actions(schedule, rank)
        kinds = Counter(action.kind for action in self._actions)
        self.forwards = Counter(
            (action.stage, action.direction) for action in self._actions if action.kind == "forward"
        )
        self.passes = [self._passes(stage, count) for (stage, _), count in self.forwards.items()]
        self.reductions = 1 if schedule.splits_backward else kinds["backward"]  # of gradients that are not kept whole
        self.updates = kinds["reduce"]
        self.is_bidirectional, self.is_versioned = schedule.is_bidirectional, schedule.is_versioned
        self.holders = max(len(holders(schedule, self.crews, stage)) for stage, _ in self.forwards)

    def messages(self, kinds: Mapping[Edge, Kinds]) -> int:
        """Bytes that the rank sends to other stages, where it is known what goes over each edge."""
        assert self._schedule is not None
        stage_of = {link: stage for stage, span in enumerate(self.spans) for link in span}
        total = 0
        for (stage, direction), count in self.forwards.items():
            into, out = self.model.crossing(self.spans[stage])
            for edge in (*into, *out):
                source, target = (self.crews.crew(stage_of[link], direction) for link in edge)
                total += count * Route(source, target).payload(kinds[edge], self._rank, back=edge in into)
        return total

    def statistics(self, element_size: int) -> int:
        """Bytes that a rank of a bidirectional schedule tells its twin of what its batch normalisations have seen, and
        the twin's have not.
        """
        if not self.is_bidirectional:
            return 0
        twin, seen = self.crews.ranks - 1 - self._rank, 0
        for (stage, direction), passes in zip(self.forwards, self.passes, strict=True):
            if twin not in self.crews.crew(stage, direction).ranks:
                seen += passes.count * sum(norm.num_features for norm in passes.norms)
        return 2 * seen * element_size

    def in_flight(self) -> int:
        """Blocks whose activations are held at the most, each once for every microbatch under way."""
        return self.most([len(passes.attentions) for passes in self.passes])

    def most(self, kept: Sequence[int]) -> int:
        """The most that is held at a time, where each of `passes` keeps so much of a microbatch until its backward."""
        if self._schedule is None:
            return kept[0]
        of_stage = dict(zip(self.forwards, kept, strict=True))
        now = most = 0
        for action in self._actions:
            if action.kind == "forward":
                now += of_stage[action.stage, action.direction]
                most = max(most, now)
            elif action.kind in ("backward", "backward_weight"):
                now -= of_stage[action.stage, action.direction]
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
        stages = {stage for stage, _ in self.forwards}
        parts = {stage: [name for link in self.spans[stage] for name in self.model.parts(link)] for stage in stages}
        found = {
            unit: 2
            * sum(
                count
                for (stage, _), count in self.forwards.items()
                if any(_overlap(unit, name) for name in parts[stage])
            )
            for unit in units
        }
        rest, is_whole = 0, False
        for action in self._actions:
            if action.kind in ("forward", "backward", "backward_input"):
                rest += not is_whole
                is_whole = action.kind not in BACKWARDS
        return found | {"": rest}

    def _passes(self, stage: int, count: int) -> StagePasses:
        of_stage = [name for link in self.spans[stage] for name in self.model.parts(link)]
        modules = dict(self.model.named_modules())
        parts = [modules[name] for name in of_stage if name in modules]
        return StagePasses(
            [name for name, _ in self.model.named_parameters() if any(_overlap(name, part) for part in of_stage)],
            [each for part in parts for each in _attentions(part)],
            [each for part in parts for each in norms_of(part).values()],
            stage == 0,
            stage == len(self.spans) - 1,
            count,
        )


def edge_kinds(whole: Linked, spans: Sequence[range], example: Given | None, dtype: torch.dtype) -> dict[Edge, Kinds]:
    """What goes from stage to stage, of a model without tiles and without memory, for microbatches like the example."""
    if example is None:
        raise ValueError("what a pipeline sends depends on its microbatches: give an example of one")
    chain, given = copy.deepcopy(whole).to(dtype).eval(), in_dtype(example, dtype)
    values: dict[Edge, Value] = {}
    for span in spans[:-1]:
        into, _ = chain.crossing(span)
        values |= chain.compute(span, given, {edge: values[edge] for edge in into})
    return {edge: kinds_of(value, Crew((0,)), is_tiled=False) for edge, value in values.items()}


def in_dtype(example: Given, dtype: torch.dtype) -> Given:
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
