"""What people run over a process group, over Echelon and over Gloo: the same losses and parameters.

On two ranks a sum has only one order, so equal means equal to the last bit; on four, equal within the rounding of
fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.rank import gloo

STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)
    )


def batch(step: int, shard: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + shard)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)


def train(model: nn.Module, shard: int) -> list[Tensor]:
    """Losses of a few steps, then the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, shard)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + [whole(parameter) for parameter in model.parameters()]


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def ddp(group: dist.ProcessGroup) -> list[Tensor]:
    return train(DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001), dist.get_rank())


def ddp_with_powersgd(group: dist.ProcessGroup) -> list[Tensor]:
    model = DistributedDataParallel(net(), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, dist.get_rank())


def ddp_without_sync(group: dist.ProcessGroup) -> list[Tensor]:
    """Gradients accumulated over two batches, and parameters that not every step uses."""
    model = DistributedDataParallel(net(), process_group=group, find_unused_parameters=True)
    for step in range(2):
        with model.no_sync() if step == 0 else contextlib.nullcontext():
            model(batch(step, dist.get_rank())[0]).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def fsdp2(group: dist.ProcessGroup) -> list[Tensor]:
    model, mesh = net(), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), dist.get_rank())


def fsdp2_in_bf16(group: dist.ProcessGroup) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(net(), mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        losses.append(loss.detach())
    return losses + [whole(parameter.grad) for parameter in model.parameters()]


def tensor_parallel(group: dist.ProcessGroup) -> list[Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, 0)


def pipeline(group: dist.ProcessGroup) -> list[Tensor]:
    layers = net()
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = {2: [0, 4, 7], 4: [0, 2, 4, 6, 7]}[size]
    stage = PipelineStage(layers[bounds[rank] : bounds[rank + 1]], rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    results = []
    for step in range(2):
        x, y = batch(step)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        results += [loss.detach() for loss in losses]
    return results + [parameter.grad.clone() for parameter in stage.submod.parameters()]


def checkpoint(group: dist.ProcessGroup, folder: str) -> list[Tensor]:
    """Save a sharded model, load it into a fresh one."""
    mesh = DeviceMesh.from_group(group, "cpu")
    saved = fully_shard(net(), mesh=mesh)
    train(saved, dist.get_rank())
    path = f"{folder}/{type(group).__name__}"
    dcp.save({"model": saved.state_dict()}, checkpoint_id=path, process_group=group)
    torch.manual_seed(2)
    loaded = fully_shard(nn.Sequential(*[type(layer)(*shape(layer)) for layer in net()]), mesh=mesh)
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=path, process_group=group)
    loaded.load_state_dict(state["model"])
    results = [whole(parameter) for parameter in loaded.parameters()]
    for result, parameter in zip(results, saved.parameters(), strict=True):
        assert torch.equal(result, whole(parameter))
    return results


def shape(layer: nn.Module) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()


def compare(strategy: Callable[..., list[Tensor]], exact: bool, *arguments: Any) -> None:
    over_echelon = strategy(dist.group.WORLD, *arguments)
    over_gloo = strategy(gloo(), *arguments)
    assert len(over_echelon) == len(over_gloo) > 0
    for ours, theirs in zip(over_echelon, over_gloo, strict=True):
        torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} if exact else {}))


STRATEGIES = (ddp, ddp_with_powersgd, ddp_without_sync, fsdp2, fsdp2_in_bf16, tensor_parallel, pipeline)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_equals_gloo(ranks, size, strategy):
    if strategy is ddp_with_powersgd and torch.cuda.is_available():
        pytest.skip("PyTorch's PowerSGD hook synchronises a CUDA device even for CPU tensors, where it finds one")
    ranks(size, compare, strategy, size == 2, timeout=120)


@pytest.mark.parametrize("size", [2, 4])
def test_checkpoint_equals_gloo(ranks, size, tmp_path):
    ranks(size, compare, checkpoint, size == 2, str(tmp_path), timeout=120)
