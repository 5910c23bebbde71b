"""What ranks hold, by kind, beside what was predicted: for memory.json of a run.

Parameters, gradients and optimizer state are the storages of the tensors that a rank has, each counted once, as
`plan.memory` counts them; the rest is the peak without these: activations above all and, of a process on a CPU,
Python and its libraries too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from echelon.comm.torch_compat import local_tensor
from echelon.parallel import tensor
from echelon.parallel.apply import part_of
from echelon.parallel.layout import Grid
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.pieces import reducer_of
from echelon.parallel.pipeline.part import Part
from echelon.plan import memory as plan
from echelon.plan.images import Images
from echelon.train.checks import attended, example, meta_model, micro_batch, passes
from echelon.train.config import Config
from echelon.train.metrics import device_of, peak_memory

Kinds = dict[str, int]  # bytes of parameters, gradients, optimizer and rest; `host`: of the optimizer, if it is there


def measure_memory(
    config: Config, grid: Grid, model: nn.Module, optimizer: Optimizer, told: Sequence[Kinds] | None
) -> dict[str, Any]:
    """Called by all ranks between a backward pass and the optimizer's step, when all kinds exist (so not in the first),
    with what was `predicted` of this rank.

    `measured` and `predicted` of rank 0, and of each kind the largest over the ranks; a prediction is None where
    there is none (fp64).
    """
    everyone: list[Any] = [None] * grid.layout.size
    dist.all_gather_object(everyone, (_measured(config, grid, model, optimizer), told and told[0]))
    measured, expected = ([each[n] for each in everyone] for n in range(2))
    return {
        "rank 0": {"measured": measured[0], "predicted": expected[0]},
        "largest": {"measured": _largest(measured), "predicted": expected[0] and _largest(expected)},
    }


def _measured(config: Config, grid: Grid, model: nn.Module, optimizer: Optimizer) -> Kinds:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    reducer = reducer_of(model)
    if reducer is not None:
        gradients += [bucket.reduced for bucket in reducer.buckets if bucket.reduced is not None]
    parameters = _storages(model.parameters())
    updated = [each for group in optimizer.inner.param_groups for each in group["params"]]
    state = [value for each in optimizer.inner.state.values() for name, value in each.items() if name != "step"]
    masters = {place: size for place, size in _storages(updated).items() if place not in parameters}
    kinds = {"parameters": sum(parameters.values()), "gradients": sum(_storages(gradients).values())}
    held = sum((masters | _storages(state)).values())
    kinds |= {"optimizer": 0, "host": held} if config.optimizer.on_cpu else {"optimizer": held, "host": 0}
    device = device_of(grid)
    on_device = sum(kinds.values()) - (kinds["host"] if device.type != "cpu" else 0)
    return kinds | {"rest": max(peak_memory(device) - on_device, 0)}


def _storages(tensors: Iterable[Any]) -> Kinds:
    """The bytes of each piece of memory, by its address."""
    found = [local_tensor(each) for each in tensors if isinstance(each, Tensor)]
    storages = [each.untyped_storage() for each in found]
    return {f"{storage.device} {storage.data_ptr()}": storage.nbytes() for storage in storages if storage.nbytes()}


def predicted(
    config: Config, *, at_peak: bool = False, ranks: Sequence[int] | None = None, images: Images | None = None
) -> list[Kinds] | None:
    """What each rank, or each of these, will hold when it is measured, or at the most in a step; None where the plan
    lacks the precision. `images` are given where they are made anyway.

    When it is measured the passes are over. Then stage 1 has no more of the gradients than stage 2; a pipeline that
    kept whole ones has summed them; and one with versions has made its last, and needs no gradients any more.
    """
    precision = config.strategies.precision
    if precision == "fp64":
        return None
    model: Any = meta_model(config)
    layout, count = config.layout, passes(config)
    training = plan.Training(
        stage=config.strategies.stage,
        precision=precision,
        optimizer=planned_optimizer(config),
        on_cpu=config.optimizer.on_cpu,
    )
    blocks: Any = getattr(model, "blocks", None)
    kv_heads = tensor.kv_heads_of(blocks[0].attention) if blocks else 0
    split = partial(tensor.split_dimension, kv_heads=kv_heads, ranks=layout.tp)
    given = example(config, layout)
    parts = [part_of(model, layout, config.strategies, rank, count, given) for rank in layout.groups("pp")[0]]
    portions = [_portion(config, part, at_peak=at_peak) for part in parts]
    images = images or images_of(config, model)
    found = []
    for rank in range(layout.size) if ranks is None else ranks:
        held = plan.held(portions, layout, training, split=split, rank=rank)
        part, gradients, rest = parts[layout.group("pp", rank).index(rank)], held.gradients, held.activations
        if training.stage == 1 and not (at_peak and count > 1):  # the plan's gradients are of passes that accumulate
            gradients = plan.held(portions, layout, replace(training, stage=2), split=split, rank=rank).gradients
        elif part.is_versioned and not at_peak:
            gradients = 0
        if images is not None:
            rest = part.most([*images.passes(rank, part).kept.values()])
        kinds = {"parameters": held.parameters, "gradients": gradients, "optimizer": held.optimizer}
        found.append(kinds | {"host": held.host, "rest": rest})
    return found


def images_of(config: Config, model: Any) -> Images | None:
    """What plans passes over images: where these are cut into tiles, or there is no formula for a model."""
    if not config.layout.is_tiled and hasattr(config.architecture, "heads"):
        return None
    return Images(model, config.layout, config.strategies, example(config, config.layout))


def _portion(config: Config, part: Part, *, at_peak: bool) -> plan.Portion:
    return plan.Portion(
        shapes=plan.shapes_of(part.model),
        work=_workload(config, part.in_flight()),
        apart=part.model.apart,
        versions=part.versions() if at_peak else 1,
        keeps_gradients=at_peak and part.keeps_gradients,
    )


def planned_optimizer(config: Config) -> str:
    """The optimizer's name in the plan."""
    momentum = config.optimizer.kind == "sgd" and config.optimizer.momentum > 0
    return "sgd with momentum" if momentum else config.optimizer.kind


def _workload(config: Config, blocks: int) -> plan.Workload | None:
    """Passes of one rank through so many of a transformer's blocks; others have no formula (see `Images`)."""
    shape: Any = config.architecture
    if not hasattr(shape, "heads"):
        return None
    keeps_scores = getattr(shape, "attention_dropout", 0.0) > 0  # PyTorch's own attention makes them anew
    recompute = config.strategies.recompute
    return plan.Workload(
        batch=micro_batch(config),
        sequence=attended(config),
        hidden=shape.dim,
        layers=blocks,
        heads=shape.heads,
        checkpointing="selective" if recompute == "none" and not keeps_scores else recompute,
    )


def _largest(ranks: Sequence[Kinds]) -> Kinds:
    return {kind: max(rank[kind] for rank in ranks) for kind in ranks[0]}
