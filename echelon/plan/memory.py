"""The bytes that each rank of a layout holds: parameters, gradients, optimizer state and activations.

Pure functions of shapes, which a model on the meta device gives (`shapes_of`). Parameters, gradients and optimizer
state are counted as the strategies of `echelon.parallel` hold them between two backward passes of one step:
- stage 0 holds all of them whole;
- stages 1 and 2 lay a unit's parameters (a block's; those of the rest) one after the other in a flat bucket that is
  cut into equal parts, one a rank of `data`. The optimizer has the parameters in its own part alone, and stage 2 keeps
  that part of the gradients alone;
- stage 3 is FSDP2: over `shard_cp`, of each parameter an equal number of rows.
Low precision means weights and gradients of 2 bytes, and a master copy of 4 beside the optimizer's state. The ranks of
a pipeline have a portion of the model each, and activations of as many microbatches as their schedule has under way.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from echelon.parallel.buckets import lay_out
from echelon.parallel.layout import Layout

if TYPE_CHECKING:
    from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
Precision = Literal["fp32", "bf16", "fp16"]
BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
STATE = {"adamw": 8, "sgd": 0, "sgd with momentum": 4}  # bytes of fp32 state a parameter
_UNIT = re.compile(r"[^.]+\.\d+(?=\.)")  # an entry of a list of modules


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, as far as memory depends on it.

    With `on_cpu` the optimizer's state, and the copy that it updates, are in the host's memory. `master` says whether
    there is such a copy where the strategies alone would not decide it so.
    """

    stage: int = 0
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    on_cpu: bool = False
    master: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (("stage", range(4)), ("precision", BYTES), ("optimizer", STATE)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known: there are {', '.join(map(str, known))}")

    @property
    def has_master(self) -> bool:
        if self.master is not None:
            return self.master
        return self.on_cpu or self.precision != "fp32"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One micro-batch through the blocks of a transformer (of a pipeline stage: its own), before anything is split."""

    batch: int
    sequence: int
    hidden: int
    layers: int
    heads: int
    checkpointing: Literal["none", "selective", "full"] = "none"


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What a rank of a pipeline has of a model: a parameter that others share is in each."""

    shapes: Shapes
    work: Workload | None = None  # `layers` counts a block once for each microbatch that it is held for
    apart: Collection[str] = ()  # the parameters that others share: each is a bucket of its own
    versions: int = 1  # copies of the weights, in use at the same time
    keeps_gradients: bool = False  # whether they are whole until the end of a step, in every stage


@dataclass(frozen=True)
class Held:
    """Bytes of one rank: four kinds on its device, and what the optimizer has on the host."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    host: int = 0

    @property
    def device(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a plain model's trainable parameters, tied ones once."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}


def held(
    model: Shapes | Sequence[Portion],
    layout: Layout,
    training: Training,
    work: Workload | None = None,
    *,
    split: Callable[[str], int | None] | None = None,
    rank: int = 0,
) -> Held:
    """What a rank holds. `model` is the whole one's shapes, of a pipeline a list with the portion of each of its ranks.
    `split` names the dimension in which tensor parallelism splits a parameter, if it does (a mapping's `get` will do).
    """
    place = layout.coordinates(rank)
    grid = layout.grids[place["pp"]]
    portion = _at(model, work, layout, layout.group("pp", rank).index(rank))
    own, work = portion.shapes, portion.work
    if split is None and grid.tp > 1:
        raise ValueError(f"{layout!r} splits matrices: say along which dimension (`split`, as tensor.split_dimension)")
    dims = {name: split(name) if split else None for name in own}
    local = {name: local_shape(shape, dims[name], grid.tp, place["tp"]) for name, shape in own.items()}
    view = layout.group("shard_cp" if training.stage == 3 else "data", rank)
    parameters, gradients, updated = _shares(local, portion.apart, training, view.index(rank), len(view))
    if portion.keeps_gradients:
        gradients = sum(map(math.prod, local.values())) * BYTES[training.precision]
    state = updated * (STATE[training.optimizer] + 4 * training.has_master)
    return Held(
        parameters * portion.versions,
        gradients,
        0 if training.on_cpu else state,
        0 if work is None else activations(work, training.precision, grid.tp, grid.cp),
        state if training.on_cpu else 0,
    )


def by_rank(
    model: Shapes | Sequence[Portion],
    layout: Layout,
    training: Training,
    work: Workload | None = None,
    *,
    split: Callable[[str], int | None] | None = None,
) -> list[Held]:
    """What each rank holds."""
    return [held(model, layout, training, work, split=split, rank=rank) for rank in range(layout.size)]


def activations(work: Workload, precision: Precision = "fp32", tp: int = 1, cp: int = 1) -> int:
    """What forward keeps for backward, by the formula for a block of attention and an MLP of four times its width.

    Sequence parallelism divides it by tp, context parallelism by cp. Selective checkpointing computes attention's
    scores anew (attention that never keeps them, as PyTorch's own where it can, counts like it); full checkpointing
    keeps what enters each block, and has the rest of one block at a time.
    """
    low = BYTES[precision]
    tokens = work.batch * work.sequence * work.hidden
    block = tokens * (16 * low + 2)
    if work.checkpointing == "none":
        block += work.batch * work.heads * work.sequence**2 * (2 * low + 1)
    whole = work.layers * tokens * low + block if work.checkpointing == "full" else work.layers * block
    return -(-whole // (tp * cp))


def _at(model: Shapes | Sequence[Portion], work: Workload | None, layout: Layout, place: int) -> Portion:
    portions = [Portion(shapes=model, work=work)] if isinstance(model, Mapping) else list(model)
    ranks = len(layout.groups("pp")[0])
    if len(portions) != ranks:
        raise ValueError(
            f"{layout!r} has pipelines of {ranks}, but there are portions for {len(portions)}: give a list with the "
            "portion of each rank"
        )
    return portions[place]


def local_shape(shape: tuple[int, ...], dim: int | None, parts: int, index: int) -> tuple[int, ...]:
    """What a rank has of a parameter that tensor parallelism splits in `dim`."""
    if dim is None or parts == 1:
        return shape
    return (*shape[:dim], _chunk(shape[dim], parts, index), *shape[dim + 1 :])


def _chunk(length: int, parts: int, index: int) -> int:
    """As PyTorch cuts: equal chunks, rounded up, until nothing is left."""
    size = -(-length // parts)
    return min(size, max(length - index * size, 0))


def _shares(local: Shapes, apart: Collection[str], training: Training, index: int, parts: int) -> tuple[int, int, int]:
    """Bytes of parameters and of gradients, and how many parameters the optimizer updates."""
    low = BYTES[training.precision]
    if training.stage == 0:
        count = sum(map(math.prod, local.values()))
        return count * low, count * low, count
    if training.stage == 3:
        rows = [(shape[0] if shape else 1, math.prod(shape[1:])) for shape in local.values()]
        padded = low * sum(-(-length // parts) * width for length, width in rows)
        return padded, padded, sum(_chunk(length, parts, index) * width for length, width in rows)
    whole = padded = updated = 0
    for counts in _buckets(local, apart):
        length, own = _cut(counts, low, index, parts)
        whole, padded, updated = whole + sum(counts), padded + length, updated + own
    return padded * low, (whole if training.stage == 1 else padded // parts) * low, updated


def _buckets(local: Shapes, apart: Collection[str]) -> list[list[int]]:
    """The sizes of the parameters of each unit, and of each that stands apart."""
    units: dict[str, list[int]] = defaultdict(list)
    for name, shape in local.items():
        found = _UNIT.match(name)
        units[name if name in apart else found[0] if found else ""].append(math.prod(shape))
    return list(units.values())


def _cut(counts: Sequence[int], element_size: int, index: int, parts: int) -> tuple[int, int]:
    """The length of a bucket of these parameters, and how much of them lies in one of its equal parts."""
    places, length = lay_out(counts, element_size, parts)
    first, last = index * length // parts, (index + 1) * length // parts
    inside = [max(0, min(place + count, last) - max(place, first)) for place, count in zip(places, counts, strict=True)]
    return length, sum(inside)
