"""What is recorded is what the formulas say: payload and wire of real training steps, counted from real parameters."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.comm.records import Log

WIDTH, HIDDEN = 31, 51  # odd: shards are padded
BATCH = 6
# What CommDebugMode calls what we call otherwise.
DEBUG_NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather_single",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
    )


def step(model: nn.Module) -> None:
    model(torch.ones(BATCH, WIDTH, requires_grad=True)).sum().backward()


def counted(model: nn.Module) -> tuple[Log, Counter]:
    """One step under our recorder and PyTorch's counter, after two that set everything up."""
    for _ in range(2):
        step(model)
    model.zero_grad()
    with echelon.comm.record() as log, CommDebugMode() as mode:
        step(model)
    return log, Counter({DEBUG_NAMES[packet.__name__]: n for packet, n in mode.get_comm_counts().items()})


def total(log: Log, operation: str) -> tuple[int, int]:
    chosen = [record for record in log if record.operation == operation]
    return sum(record.payload for record in chosen), sum(record.wire for record in chosen)


def assert_agrees(log: Log, counts: Counter) -> None:
    assert Counter(record.operation for record in log) == counts
    assert all(record.enqueued <= record.started <= record.ended for record in log)
    numbers = [record.sequence for record in log]
    assert numbers == list(range(numbers[0], numbers[0] + len(log)))


def ddp() -> None:
    n = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(n)), mesh_dim_names=("dp",))
    model = DistributedDataParallel(net(), process_group=mesh.get_group(), bucket_cap_mb=0.01)
    log, counts = counted(model)
    assert_agrees(log, counts)
    assert len(log) > 1
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    payload, wire = total(log, "all_reduce")
    assert payload == parameters
    assert wire == sum(2 * (n - 1) * record.payload // n for record in log)
    for record in log:
        assert (record.dimension, record.dtype, record.ranks) == ("dp", "float32", tuple(range(n)))
        assert (record.modelled, record.transport, record.algorithm) == (True, "mpi", "library")


def padded(module: nn.Module, n: int) -> int:
    """Bytes of a module's parameters, each dealt out by rows to `n` ranks in equal shares."""
    return sum(-(-p.shape[0] // n) * n * p[0].numel() * 4 for p in module.parameters())


def fsdp2() -> None:
    n = dist.get_world_size()
    plain = net()
    sizes = [padded(layer, n) for layer in plain if isinstance(layer, nn.Linear)]
    assert sum(sizes) > sum(parameter.nbytes for parameter in plain.parameters())  # there is padding
    mesh = DeviceMesh("cpu", list(range(n)), mesh_dim_names=("dp",))
    for layer in (plain[0], plain[2]):
        fully_shard(layer, mesh=mesh)
    log, counts = counted(fully_shard(plain, mesh=mesh))
    assert_agrees(log, counts)
    # Forward gathers all; backward gathers again what was given up: not the root's own, which holds the last layer.
    payload, wire = total(log, "all_gather_single")
    assert payload == sum(sizes) + sum(sizes[:2])
    assert wire == payload * (n - 1) // n
    payload, wire = total(log, "reduce_scatter_single")
    assert payload == sum(sizes)
    assert wire == payload * (n - 1) // n
    assert {record.dimension for record in log} == {"dp"}


def tensor_parallel() -> None:
    n = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(n)), mesh_dim_names=("tp",))
    layers = nn.Sequential(nn.Linear(WIDTH, 8 * n), nn.GELU(), nn.Linear(8 * n, HIDDEN))
    model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    log, counts = counted(model)
    assert_agrees(log, counts)
    # The row-split layer's output forward, the column-split layer's input backward.
    assert [record.payload for record in log] == [BATCH * HIDDEN * 4, BATCH * WIDTH * 4]
    assert [record.wire for record in log] == [2 * (n - 1) * record.payload // n for record in log]
    assert {(record.operation, record.dimension) for record in log} == {("all_reduce", "tp")}


def from_another_thread() -> None:
    """A backward pass in a thread of its own."""
    model = DistributedDataParallel(net())
    with echelon.comm.record() as log:
        thread = threading.Thread(target=step, args=(model,))
        thread.start()
        thread.join()
    assert total(log, "all_reduce")[0] == sum(parameter.nbytes for parameter in model.parameters())


def every_operation() -> dict[str, tuple[int, int, bool, str]]:
    """Payload, wire, whether modelled, and algorithm, of one operation of each kind."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x, parts = torch.ones(12), list(torch.ones(n, 12).unbind())
    low, large = torch.ones(12, dtype=torch.bfloat16), torch.ones(n * 2**18)
    with echelon.comm.record() as log:
        dist.all_reduce(x)
        dist.all_reduce(low)
        dist.broadcast(x, 0)
        dist.reduce(x, 1)
        dist.all_gather(parts, x)
        dist.gather(x, parts if rank == 0 else None, 0)
        dist.scatter(x, parts if rank == 0 else None, 0)
        dist.reduce_scatter(x, parts)
        dist.reduce_scatter_tensor(torch.ones(2**18), large)
        dist.all_to_all_single(torch.ones(n), torch.ones(n))
        dist.barrier()
    return [(r.operation, r.payload, r.wire, r.modelled, r.algorithm) for r in log]


def messages() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    with echelon.comm.record() as log:
        work = dist.isend(torch.ones(100), (rank + 1) % n)
        dist.recv(torch.ones(100), (rank - 1) % n)
        work.wait()
    assert [(r.operation, r.payload, r.wire, r.peer) for r in log] == [
        ("send", 400, 400, (rank + 1) % n),
        ("receive", 0, 0, (rank - 1) % n),
    ]
    assert all(record.started <= record.ended for record in log)


def blocked(kind: str) -> float:
    """Seconds in which rank 0 could do nothing else while rank 1 was late by one second."""
    model = DistributedDataParallel(net())
    step(model)
    dist.barrier()
    with echelon.comm.record() as log:
        if dist.get_rank() == 1:
            time.sleep(1)
        if kind == "ddp":
            step(model)
        elif kind == "async, waited for late":
            work = dist.all_reduce(torch.ones(3), async_op=True)
            while not work.is_completed():
                time.sleep(0.01)  # this rank is free to do something else
            work.wait()
        elif kind == "async":
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        else:
            dist.all_reduce(torch.ones(3))
    return sum(record.blocked for record in log) / 1e9


def nothing_left_behind() -> None:
    """When nobody records any more, the short way is taken again and no hook stays."""
    with echelon.comm.record() as outer:
        with echelon.comm.record() as inner:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    assert (len(outer), len(inner)) == (2, 1)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    with echelon.comm.record() as log:
        optimizer.step()
    optimizer.step()
    assert len(log.steps) == 1


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("body", [ddp, fsdp2, tensor_parallel, from_another_thread], ids=lambda body: body.__name__)
def test_steps(ranks, body, size):
    ranks(size, body)


def test_every_operation(ranks):
    seen = ranks(3, every_operation)
    x, large = 48, 3 * 2**20
    for rank, records in enumerate(seen):
        assert records == [
            ("all_reduce", x, 64, True, "library"),
            ("all_reduce", 24, 32, True, "exchange + all_gather_uneven"),
            ("broadcast", x, x, True, "library"),
            ("reduce", x, x, True, "library"),
            ("all_gather", 3 * x, 2 * x, True, "library"),
            ("gather", 3 * x, 0 if rank == 0 else x, False, "exchange"),
            ("scatter", 3 * x, 2 * x if rank == 0 else 0, False, "exchange"),
            ("reduce_scatter", 3 * x, 2 * x, True, "library"),
            ("reduce_scatter_single", large, large * 2 // 3, False, "exchange"),
            ("all_to_all_single", 12, 8, False, "exchange"),
            ("barrier", 0, 0, False, "library"),
        ]


@pytest.mark.parametrize("size", [2, 3])
def test_messages(ranks, size):
    ranks(size, messages)


@pytest.mark.parametrize("kind", ["sync", "async", "ddp"])
def test_blocked(ranks, kind):
    assert 0.5 < ranks(2, blocked, kind)[0] < 5


def test_not_blocked(ranks):
    assert ranks(2, blocked, "async, waited for late")[0] < 0.5


def test_nothing_left_behind(ranks):
    ranks(2, nothing_left_behind)
