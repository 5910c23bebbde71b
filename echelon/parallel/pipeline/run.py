"""One runtime for all schedules: each rank takes its actions one after the other, and waits only for what it needs.

    spans = partition(model, schedule.stages)
    model.keep(held(schedule, spans), rank)              # then strategies, as for any model
    pipeline = Pipeline(model, spans, schedule, group)
    losses = pipeline.run(microbatches, lambda out, microbatch: out / count)

All ranks of a pipeline are given all microbatches: the first stage takes their inputs, the last their targets, and
those between whatever their blocks need beside the stream. What the last stage gives is made a number by `loss`, and
the gradients of its sum over the microbatches are in the parameters after a run: those of one process. A schedule with
versions also updates, after each of its steps. Layer parallelism is a pipeline with one microbatch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from echelon.comm.torch_compat import reduce_kept_gradients
from echelon.models.chain import Edge, Given, Linked, Value
from echelon.models.held import plain_name
from echelon.parallel import data
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.pieces import reducer_of
from echelon.parallel.pipeline.actions import BACKWARDS, Action, Direction, Schedule
from echelon.parallel.pipeline.crews import Crews
from echelon.parallel.pipeline.mail import (
    Kinds,
    Mail,
    Route,
    Signature,
    check_value,
    kinds_of,
    parts_of,
    shown,
    signature,
)
from echelon.parallel.pipeline.schedule import forward_only
from echelon.parallel.pipeline.statistics import Replay, frozen, norms_of
from echelon.parallel.pipeline.ties import Ties
from echelon.parallel.pipeline.versions import Versions
from echelon.parallel.pipeline.weight_gradients import split
from echelon.parallel.spatial import cut_images, leaving
from echelon.parallel.spatial.tiles import Ground, plain

Loss = Callable[[Any, int], Tensor]  # of what the last stage gives for a microbatch
_Key = tuple[int, Direction, int]  # stage, direction, microbatch


class OutOfMemoryError(RuntimeError):
    """A stage does not fit; says which, and what would do."""


@dataclass
class _Flight:
    """A microbatch between its passes through a stage."""

    received: dict[Edge, tuple[Value, Kinds]]
    out: dict[Edge, tuple[Value, Kinds]] = field(default_factory=dict)
    loss: Tensor | None = None


class Pipeline:
    """One rank of a pipeline, whose ranks are those of `group`, in order. `model` has kept this rank's links alone.

    A stage has one rank, or a crew of them: each computes a tile of the images on the ground of its direction.

    `recompute` are the stages that keep only what they received, and compute the rest again in the backward pass.
    `times`, once it is a list, gets the action, beginning and end of all that is computed, reduced and updated.
    """

    def __init__(
        self,
        model: Linked,
        spans: Sequence[range],
        schedule: Schedule,
        group: dist.ProcessGroup,
        *,
        recompute: Sequence[int] = (),
        crews: Crews | None = None,
        grounds: Mapping[Direction, Ground] = MappingProxyType({}),
    ) -> None:
        self.crews = crews or Crews.alone(schedule.ranks)
        if dist.get_world_size(group) != self.crews.ranks or len(spans) != schedule.stages:
            raise ValueError(
                f"a schedule of {self.crews.ranks} ranks and {schedule.stages} stages, but there are "
                f"{dist.get_world_size(group)} ranks and {len(spans)} spans of links: make the schedule for the "
                "group, and partition the model into its stages"
            )
        if next(model.parameters(), None) is None:
            place = f"rank {dist.get_rank(group)} of the pipeline"
            raise ValueError(f"{place} holds no parameters: choose fewer stages, or another balance")
        if schedule.is_versioned and model.apart:
            raise ValueError(
                f"{schedule.name} updates each stage by itself, so that no two can share {' and '.join(model.apart)}: "
                "use a synchronous schedule, or a model that ties nothing"
            )
        self.model, self.schedule, self.group = model, schedule, group
        self.rank = dist.get_rank(group)
        self._grounds = grounds
        self.times: list[tuple[Action, float, float]] | None = None
        self.versions = Versions(model) if schedule.is_versioned else None
        self._spans, self._recompute = list(spans), set(recompute)
        self._crossing = [model.crossing(span) for span in spans]  # the edges into each stage and out of it
        self._stage_of = {link: stage for stage, span in enumerate(spans) for link in span}
        self._device = next(model.parameters()).device
        self._mail = Mail(group, model.edges(), self._device)
        self._later = split(model) if schedule.splits_backward else None
        self._ties = Ties(model, group)
        self._replay = self._make_replay() if schedule.is_bidirectional else None
        self._flights: dict[_Key, _Flight] = {}
        self._given: Sequence[Given] = ()
        self._signatures: list[Signature] = []
        self._results: list[Any] = []
        self._loss: Loss | None = None  # of a run; a forward pass alone has none
        self._optimizer: Optimizer | None = None
        self.norms: list[float] = []  # of the gradients of each version that the last run has made

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage, or a copy of it."""
        return any(stage == self.schedule.stages - 1 for stage, _ in self.crews.held(self.schedule, self.rank))

    def has_tiles(self, stage: int) -> bool:
        """Whether a stage computes tiles: all do, if there is ground, or those that have crews."""
        alike = self.crews.ranks == self.schedule.ranks
        return bool(self._grounds) and (alike or self.crews.crew(stage).tiles != (1, 1))

    def run(self, microbatches: Sequence[Given], loss: Loss, optimizer: Optimizer | None = None) -> list[Tensor | None]:
        """One step; returns the losses of the microbatches that ended on this rank, None for the others. With versions
        an optimizer is needed, which makes them.
        """
        actions = self.crews.actions(self.schedule, self.rank)
        if self.versions is not None:
            if optimizer is None:
                raise ValueError(f"{self.schedule.name} updates while it runs: give `run` an optimizer")
            self.versions.begin(each.version for each in actions if each.kind == "forward")
        self._loss, self._optimizer, self.norms = loss, optimizer, []
        passes = [action for action in actions if action.kind in BACKWARDS]
        if not passes:
            raise ValueError(f"this schedule of {self.schedule.name} has no backward passes: call `forward`")
        self._begin(microbatches)
        for action in actions:
            with self._accumulating(action, passes[-1]):
                self._take(action)
        return self._end()

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Given]) -> list[Any]:
        """What the model gives for each microbatch, on the rank where it ends; None elsewhere."""
        self._loss = None
        self._begin(microbatches)
        for action in self.crews.actions(forward_only(self.schedule), self.rank):
            self._take(action)
        return self._end()

    def _begin(self, microbatches: Sequence[Given]) -> None:
        if len(microbatches) != self.schedule.microbatches:
            raise ValueError(
                f"{len(microbatches)} microbatches for a schedule of {self.schedule.microbatches}: make one for so many"
            )
        self._given = microbatches
        self._signatures = [signature(given, self.model.training) for given in microbatches]
        self._results = [None] * len(microbatches)
        self._flights = {}

    def _end(self) -> list[Any]:
        self._mail.finish(self._signatures)
        if self._replay is not None and self._loss is not None:
            self._replay.finish(self.schedule.microbatches)
        results, self._results, self._given = self._results, [], ()
        return results

    def _take(self, action: Action) -> None:
        try:
            getattr(self, f"_{action.kind}")(action)
        except (RuntimeError, MemoryError) as error:
            if not _is_about_memory(error):
                raise
            raise OutOfMemoryError(self._out_of_memory(action)) from error

    def _forward(self, action: Action) -> None:
        number, told = action.microbatch, self._signatures[action.microbatch]
        into, _ = self._crossing[action.stage]
        received = {edge: self._mail.take(edge, number, told, self._route(edge, action)) for edge in into}
        with self._timed(action), self._noted(number):
            out = self._compute(action, {edge: shown(*each, self._ground(action)) for edge, each in received.items()})
            flight = _Flight(received)
            if action.stage < self.schedule.stages - 1:
                flight.out = {edge: self._told(edge, value, action) for edge, value in out.items()}
            elif self._loss is None:
                self._results[number] = self._given_out(out, action)
            else:
                flight.loss = self._loss(self._given_out(out, action), number)
                self._results[number] = flight.loss.detach()
        self._flights[_key(action)] = flight
        if self.schedule.ranks == 1:
            self._send_activation(action)

    def _compute(self, action: Action, received: dict[Edge, Value]) -> Any:
        training = self._loss is not None
        weights = self.versions.use(action.version) if self.versions is not None and training else None
        span, given = self._spans[action.stage], self._given[action.microbatch]
        if action.stage == 0 and (ground := self._ground(action)) is not None:
            given = cut_images(given, ground)
        if training and action.stage in self._recompute:
            contexts = partial(_contexts, self.model)
            return checkpoint(
                self.model.compute, span, given, received, weights, use_reentrant=False, context_fn=contexts
            )
        return self.model.compute(span, given, received, weights)

    def _backward(self, action: Action) -> None:
        self._pass_back(action)
        if self.versions is not None:
            self.versions.release(action.version)

    def _backward_input(self, action: Action) -> None:
        assert self._later is not None
        with self._later.hold(_key(action)):
            self._pass_back(action)

    def _backward_weight(self, action: Action) -> None:
        assert self._later is not None
        with self._timed(action):
            self._later.make(_key(action))

    def _pass_back(self, action: Action) -> None:
        """From the gradients of what a stage gave to those of what it received."""
        flight, number, told = self._flights[_key(action)], action.microbatch, self._signatures[action.microbatch]
        outputs: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for edge, (value, _) in flight.out.items():
            arrived = self._mail.take_gradient(edge, number, told, self._route(edge, action))
            outputs += [each for each in parts_of(value) if each.requires_grad]
            gradients += arrived
        with self._timed(action):
            if flight.loss is not None:
                flight.loss.backward()  # type: ignore[no-untyped-call]
            elif outputs:
                torch.autograd.backward(outputs, gradients)
        flight.out, flight.loss = {}, None
        if self.schedule.ranks == 1:
            self._send_gradient(action)

    def _send(self, action: Action) -> None:
        getattr(self, f"_send_{action.what}")(action)

    def _send_activation(self, action: Action) -> None:
        flight, number = self._flights[_key(action)], action.microbatch
        for edge, (value, kinds) in flight.out.items():
            self._mail.send(edge, number, self._signatures[number], value, kinds, self._route(edge, action))
        if self._loss is None:
            del self._flights[_key(action)]

    def _send_gradient(self, action: Action) -> None:
        for edge, (value, kinds) in self._flights.pop(_key(action)).received.items():
            self._mail.send_gradient(edge, action.microbatch, value, kinds, self._route(edge, action))

    def _receive(self, action: Action) -> None:
        number, told = action.microbatch, self._signatures[action.microbatch]
        into, out = self._crossing[action.stage]
        if action.what == "activation":
            for edge in into:
                self._mail.receive(edge, number, told, self._route(edge, action))
        else:
            for edge in out:
                self._mail.receive_gradient(edge, number, told, self._route(edge, action))

    def _reduce(self, action: Action) -> None:
        reducer = reducer_of(self.model)
        with self._timed(action):
            if reducer is not None:
                reducer.finish()
            elif self._later is not None:
                reduce_kept_gradients(self.model)
            self._ties.sum_gradients()

    def _step(self, action: Action) -> None:
        """Of a synchronous schedule it is the caller's."""
        if self.versions is not None and self._optimizer is not None:
            with self._timed(action):
                self.norms.append(self.versions.update(self._optimizer))

    def _route(self, edge: Edge, action: Action) -> Route:
        source, target = (self.crews.crew(self._stage_of[link], action.direction) for link in edge)
        return Route(source, target)

    def _ground(self, action: Action) -> Ground | None:
        """Where a stage computes tiles, if it does."""
        return self._grounds[action.direction] if self.has_tiles(action.stage) else None

    def _told(self, edge: Edge, value: Any, action: Action) -> tuple[Value, Kinds]:
        """What a stage gives, as plain tensors, and what these are."""
        check_value(value, edge)
        kinds = kinds_of(value, self.crews.crew(action.stage, action.direction), self.has_tiles(action.stage))
        return tuple(map(plain, value)) if isinstance(value, tuple) else plain(value), kinds

    def _given_out(self, out: Any, action: Action) -> Any:
        """What the model gives in the end."""
        ground = self._ground(action)
        return out if ground is None else leaving(out, ground)

    def _make_replay(self) -> Replay:
        twin = self.crews.ranks - 1 - self.rank
        stage_of = {
            number: stage
            for number, name in enumerate(norms_of(self.model))
            for stage, span in enumerate(self._spans)
            if any(plain_name(name).startswith(f"{part}.") for link in span for part in self.model.parts(link))
        }

        def sees(rank: int, norm: int, microbatch: int) -> bool:
            way = self.schedule.direction_of(microbatch)
            return rank in self.crews.crew(stage_of[norm], way).ranks

        return Replay(self.model, self.group, twin, sees)

    def _accumulating(self, action: Action, last: Action) -> contextlib.AbstractContextManager[None]:
        """In which backward passes run. The last one sums gradients while it goes on, but where those of weights come
        later, or where the ranks to sum with wait for what this one will send then.
        """
        if action.kind not in BACKWARDS:
            return contextlib.nullcontext()
        if self.schedule.splits_backward or self.schedule.is_bidirectional:
            return data.keep_gradients(self.model)
        return contextlib.nullcontext() if action is last else data.accumulate(self.model)

    def _noted(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        if self._replay is None or self._loss is None:
            return contextlib.nullcontext()
        return self._replay.note(microbatch)

    @contextlib.contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.times is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.times.append((action, start, time.perf_counter()))

    def _out_of_memory(self, action: Action) -> str:
        under_way = "1 microbatch" if len(self._flights) == 1 else f"{len(self._flights)} microbatches"
        return (
            f"stage {action.stage} of {self.schedule.stages} (links {_text(self._spans[action.stage])}, on rank "
            f"{self.rank} of the pipeline) ran out of memory in {action}, with {under_way} under way. Use "
            "smaller microbatches, recomputation, more stages or another balance, or a schedule that holds "
            "fewer microbatches (1f1b instead of gpipe)"
        )


def _key(action: Action) -> _Key:
    return action.stage, action.direction, action.microbatch


def _contexts(model: Linked) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Of the first computation, and of the second."""
    return contextlib.nullcontext(), frozen(model)


def _is_about_memory(error: BaseException) -> bool:
    words = "not enough memory", "can't allocate memory"  # of PyTorch on CPUs
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(each in str(error) for each in words)


def _text(span: range) -> str:
    return str(span.start) if len(span) == 1 else f"{span.start} to {span.stop - 1}"
