"""DDP, FSDP2 and tensor parallelism equal one process, whichever road each of their operations takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.comm.records import Log
from tests.comm.tables import in_force, random_table

RANKS, TABLES, STEPS = 4, 10, 3
WIDTH, HIDDEN, BATCH = 24, 96, 3  # a matrix is larger than the largest bound of a random table


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
    ).double()


def samples(step: int, ranks: list[int]) -> Tensor:
    """What these ranks see of a batch."""
    each = torch.randn(RANKS, BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return each[ranks].flatten(0, 1)


def train(model: nn.Module, ranks: list[int]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x = samples(step, ranks)
        nn.functional.mse_loss(model(x), x.flip(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


def ddp(group: dist.ProcessGroup) -> list[Tensor]:
    model = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.01)
    return train(model, [dist.get_rank()])


def fsdp2(group: dist.ProcessGroup) -> list[Tensor]:
    model, mesh = net(), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), [dist.get_rank()])


def tensor_parallel(group: dist.ProcessGroup) -> list[Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, list(range(RANKS)))


STRATEGIES: dict[str, Callable[[dist.ProcessGroup], list[Tensor]]] = {"DDP": ddp, "FSDP2": fsdp2, "TP": tensor_parallel}


def check(seed: int) -> list[str]:
    """Under the table of that seed; returns the roads that were taken."""
    alone = train(net(), list(range(RANKS)))
    log = Log()
    for name, strategy in STRATEGIES.items():
        with in_force(random_table(seed, (RANKS,))):
            group = dist.new_group()
        group._roads.nodes = (0, 0, 1, 1)  # so two levels are two
        with echelon.comm.record() as records:
            together = strategy(group)
        log += records
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"table {seed}, {name}: {text}"
            )
    return [f"{record.transport} {record.algorithm}" for record in log]


def test_training_equals_one_process_under_random_tables(ranks):
    """And together the tables send it over every road."""
    taken: set[str] = set()
    for seed in range(TABLES):
        for roads in ranks(RANKS, check, seed, timeout=120):
            taken.update(roads)
    for transport in ("mpi", "gloo"):
        for algorithm in ("library", "ring", "two-level", "shared"):
            assert f"{transport} {algorithm}" in taken
