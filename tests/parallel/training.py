"""How ranks train the models of `nets` in data parallelism, and how far that is from one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.parallel import data
from echelon.parallel.optimizer import Optimizer
from tests.parallel.nets import Net, Result, SplitNet, batch, error, train_alone

STRATEGIES = ["replicate", "shard 1", "shard 2", "shard 3", "hybrid"]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def data_mesh(strategy: str) -> DeviceMesh:
    n = dist.get_world_size()
    if strategy == "hybrid":
        return init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))


def apply(model: nn.Module, strategy: str, mesh: DeviceMesh) -> nn.Module:
    if strategy == "replicate":
        return data.replicate(model, mesh)
    return data.shard(model, mesh, stage=3 if strategy == "hybrid" else int(strategy[-1]))


def my_samples(step: int, rank: int, ranks: int, backwards: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's samples of a step's batch, for each backward pass."""
    tokens, targets = (whole.chunk(ranks)[rank] for whole in batch(step))
    yield from zip(tokens.chunk(backwards), targets.chunk(backwards))


def backward(model: nn.Module, scale: Callable[[Tensor], Tensor], samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The backward passes of one step; returns this rank's part of the loss."""
    total = torch.zeros((), dtype=torch.float64)
    count = batch(0)[1].numel()
    device = next(model.parameters()).device
    for index, (tokens, targets) in enumerate(samples):
        with data.accumulate(model) if index < len(samples) - 1 else contextlib.nullcontext():
            loss = model(tokens.to(device), targets.to(device)) / count
            scale(loss).backward()
            total += loss.detach().cpu()
    return total


def train(
    model: nn.Module, mesh: DeviceMesh, make: Any, max_norm: float | None, backwards: int, on_cpu: bool
) -> Result:
    """As `train_alone`, with a strategy applied to the model."""
    optimizer = Optimizer(make, model, on_cpu=on_cpu)
    result = Result()
    rank = mesh.mesh.flatten().tolist().index(dist.get_rank())
    for step in range(5):
        total = backward(model, optimizer.scale, list(my_samples(step, rank, mesh.size(), backwards)))
        for dim in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dim))
        result.losses.append(total.item())
        result.gradients.append({name: grad.clone() for name, grad in data.full_gradients(model).items()})
        result.norms.append(optimizer.step(max_norm))
    result.parameters = data.full_parameters(model)
    return result


def errors(
    strategy: str,
    dtype: torch.dtype,
    make: Any,
    max_norm: float | None = None,
    backwards: int = 1,
    on_cpu: bool = False,
    block_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """How far each thing is from one process's; computed on the ranks, since tensors do not travel back from there."""

    def build() -> nn.Module:
        model = Net().to(dtype)
        model.blocks.to(block_dtype or dtype)
        return model

    model, mesh = build(), data_mesh(strategy)
    if dist.get_rank() > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)  # the strategy makes them equal
    result = train(apply(model, strategy, mesh), mesh, make, max_norm, backwards, on_cpu)
    return difference(result, train_alone(build(), make, max_norm))


def errors_when_split(strategy: str, backwards: int) -> dict[str, float]:
    """Data × tensor parallelism."""
    n = dist.get_world_size()
    shape = (2, n // 4, 2) if strategy == "hybrid" else (n // 2, 2)
    names = ("replicate", "shard", "tp") if strategy == "hybrid" else ("dp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = SplitNet().double()
    model.split(mesh["tp"])
    outer = mesh[names[:-1]]
    result = train(apply(model, strategy, outer), outer, SGD, 0.5, backwards, on_cpu=False)
    return difference(result, train_alone(SplitNet().double(), SGD, 0.5))


def difference(result: Result, expected: Result) -> dict[str, float]:
    return {each: error(getattr(result, each), getattr(expected, each)) for each in vars(expected)}
