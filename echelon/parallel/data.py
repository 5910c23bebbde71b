"""Data parallelism: every rank its own samples, gradients summed over all of them.

`replicate` keeps everything on every rank; `shard` divides what is held between steps: the optimizer's state
(stage 1), gradients too (stage 2), parameters too (stage 3, by PyTorch's FSDP2; on a mesh of two dimensions, replicas
× shards, each replica divides by itself). All leave the *sum* of the ranks' gradients, so a rank's loss is divided
by the count over all ranks. All start from the parameters of the mesh's first rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from echelon.comm.torch_compat import local_tensor, newest, sum_gradients
from echelon.parallel.buckets import MeshOf, unit_modules
from echelon.parallel.pieces import reducer_of
from echelon.parallel.reduce import Reducer, as_gradient


def replicate(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    apart: DeviceMesh | None = None,
    alone: bool = False,
    mesh_of: MeshOf | None = None,
) -> nn.Module:
    """All on every rank; gradients are all-reduced during backward, and then stand where PyTorch has them.

    The ranks of `apart`, another dimension, start equal too, but then go their own ways: local SGD, whose models
    `average.average` brings together. With `alone` the ranks of the mesh update without waiting for any others.
    Where not all ranks hold the same parameters, `mesh_of` a parameter's or buffer's name gives those that do.
    """
    return _with_reducer(model, mesh, 0, apart, alone, mesh_of)


def shard(model: nn.Module, mesh: DeviceMesh, stage: int, *, reshard_after_forward: bool = True) -> nn.Module:
    """Divide the optimizer's state (stage 1), gradients too (2), parameters too (3) between the ranks of a mesh.

    Stages 1 and 2 need `optimizer.Optimizer`. For stage 3 the mesh may have two dimensions, replicas × shards; without
    `reshard_after_forward` blocks stay whole from forward to backward, for a third less traffic.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage}: shard knows the stages 1, 2 and 3; stage 0 is data.replicate")
    if stage < 3:
        return _with_reducer(model, mesh, stage)
    _refuse_second_strategy(model)
    _start_equal(model, mesh)
    for module in [*unit_modules(model).values(), model]:
        if module is model or any(True for _ in module.parameters()):
            again = reshard_after_forward and module is not model
            sum_gradients(fully_shard(module, mesh=mesh, reshard_after_forward=again))
    return model


def prefetch_within(model: nn.Module, spans: Iterable[Sequence[str]]) -> None:
    """In stage 3, let backward passes gather ahead only what they will need: of the modules that a span names, the one
    before. (By itself FSDP2 takes what was computed before, which in a pipeline may be of another pass.)
    """
    modules = dict(model.named_modules())
    for names in spans:
        units = [modules[name] for name in names if isinstance(modules[name], FSDPModule)]
        for before, unit in zip([*units[:1], *units], units, strict=False):
            unit.set_modules_to_backward_prefetch([before])
    if isinstance(model, FSDPModule):
        model.set_modules_to_backward_prefetch([model])


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Backward passes in here only add to the step's gradients: all but the last of a step belong here.

    Nothing is sent, but where whole gradients are never held: stages 2 and 3 reduce those of every backward pass (over
    the shards alone, if there are replicas).
    """
    reducer = reducer_of(model)
    if reducer is not None:
        reducer.accumulating = True
    elif isinstance(model, FSDPModule):
        model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        if reducer is not None:
            reducer.accumulating = False
        elif isinstance(model, FSDPModule):
            model.set_requires_all_reduce(True)


@contextmanager
def keep_gradients(model: nn.Module) -> Iterator[None]:
    """Backward passes in here send nothing, in any stage: gradients add up whole, for `Reducer.finish` or, in stage 3,
    `torch_compat.reduce_kept_gradients`.
    """
    reducer = reducer_of(model)
    if reducer is not None:
        reducer.holding = True
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        if reducer is not None:
            reducer.holding = False
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)


@torch.no_grad()
def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every trainable parameter's whole gradient, on every rank (of all meshes: all must call), between backward and
    the optimizer's step. For tests and for looking at small models.
    """
    reducer = reducer_of(model)
    if reducer is not None and reducer.stage > 0:
        return _gathered_gradients(model, reducer)
    return {
        name: torch.zeros_like(_full(parameter)) if parameter.grad is None else _full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, on every rank; all must call."""
    return {name: _full(parameter).clone() for name, parameter in model.named_parameters()}


def _with_reducer(
    model: nn.Module,
    mesh: DeviceMesh,
    stage: int,
    apart: DeviceMesh | None = None,
    alone: bool = False,
    mesh_of: MeshOf | None = None,
) -> nn.Module:
    if mesh.ndim != 1:
        raise ValueError(f"stage {stage} works over a mesh of one dimension, but this one has {mesh.ndim}: flatten it")
    _refuse_second_strategy(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"stage {stage} needs a model with memory: call to_empty and initialize it (or load it) first")
    for each in filter(None, (apart, mesh)):
        _start_equal(model, each, mesh_of if each is mesh else None)
    model.gradient_reducer = Reducer(model, mesh, stage, alone or apart is not None, mesh_of)  # type: ignore[assignment]
    return model


def _refuse_second_strategy(model: nn.Module) -> None:
    if reducer_of(model) is not None or isinstance(model, FSDPModule):
        raise ValueError("this model has a data strategy already: apply one, once")


@torch.no_grad()
def _start_equal(model: nn.Module, mesh: DeviceMesh, mesh_of: MeshOf | None = None) -> None:
    """Parameters and buffers become those of the mesh's first rank: one broadcast a unit and dtype."""
    modules = unit_modules(model)
    groups: dict[tuple[DeviceMesh, str, torch.dtype], list[Tensor]] = defaultdict(list)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        local = local_tensor(tensor)
        if not local.is_meta:
            unit = next((unit for unit in modules if name.startswith(f"{unit}.")), "")
            groups[mesh_of(name) if mesh_of else mesh, unit, local.dtype].append(local)
    for (over, _, _), tensors in groups.items():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        for dim in range(over.ndim):
            dist.broadcast(flat, group=over.get_group(dim), group_src=0)
        for tensor, value in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(value.view(tensor.shape))


def _gathered_gradients(model: nn.Module, reducer: Reducer) -> dict[str, Tensor]:
    gather = newest("all_gather_single", "all_gather_into_tensor")
    gradients = {}
    for bucket in reducer.buckets:
        flat = bucket.empty()
        if bucket.reduced is not None:
            gather(flat, bucket.reduced, group=reducer.group)
        for name, parameter in bucket.parameters.items():
            gradients[name] = _full(as_gradient(parameter, bucket.view(flat, parameter)))
    return {name: gradients[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
