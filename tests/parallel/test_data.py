"""Every stage trains as one process does: losses, norms, gradients and parameters."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from echelon.parallel import data
from echelon.parallel.optimizer import Optimizer
from tests.parallel.nets import Net, Result, batch, error, train_alone

STRATEGIES = ["replicate", "shard 1", "shard 2", "shard 3", "hybrid"]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def apply(model: nn.Module, strategy: str) -> nn.Module:
    n = dist.get_world_size()
    if strategy == "hybrid":
        return data.shard(model, init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "shard")), stage=3)
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
    if strategy == "replicate":
        return data.replicate(model, mesh)
    return data.shard(model, mesh, stage=int(strategy[-1]))


def train(
    strategy: str,
    dtype: torch.dtype,
    make,
    max_norm: float | None = None,
    micro_batches: int = 1,
    on_cpu: bool = False,
    steps: int = 5,
) -> Result:
    """As `train_alone`, each rank on its own samples, in several backward passes a step."""
    model = Net().to(dtype)
    if dist.get_rank() > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)  # the strategy must make them equal
    model = apply(model, strategy)
    optimizer = Optimizer(make, model, on_cpu=on_cpu)
    result = Result()
    for step in range(steps):
        mine = [whole.chunk(dist.get_world_size())[dist.get_rank()] for whole in batch(step)]
        count = batch(step)[1].numel()
        parts = zip(*(part.chunk(micro_batches) for part in mine))
        total = torch.zeros((), dtype=torch.float64)
        for index, (some_tokens, some_targets) in enumerate(parts):
            with data.accumulate(model) if index < micro_batches - 1 else contextlib.nullcontext():
                loss = model(some_tokens, some_targets) / count
                optimizer.scale(loss).backward()
                total += loss.detach()
        dist.all_reduce(total)
        result.losses.append(total.item())
        result.gradients.append({name: grad.clone() for name, grad in data.full_gradients(model).items()})
        result.norms.append(optimizer.step(max_norm))
    result.parameters = data.full_parameters(model)
    return result


def errors(strategy: str, dtype: torch.dtype, make, max_norm: float | None = None, **options) -> dict[str, float]:
    """How far a run is from one process's, computed on each rank: tensors do not travel back from there."""
    result, expected = train(strategy, dtype, make, max_norm, **options), train_alone(dtype, make, max_norm)
    return {each: error(getattr(result, each), getattr(expected, each)) for each in vars(expected)}


def errors_with(keywords: dict, *arguments) -> dict[str, float]:
    return errors(*arguments, **keywords)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_fp64(ranks, strategy, size, micro_batches):
    for seen in ranks(size, errors_with, {"micro_batches": micro_batches}, strategy, torch.float64, SGD, 0.5):
        assert max(seen.values()) < 1e-9, seen
