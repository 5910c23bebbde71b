"""CUDA tensors over MPI, on ranks that share one GPU: every operation, streams, futures, messages, and training.

Each test runs over both ways that such ranks have: the GPU's own memory, and pinned memory of the host.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from echelon.comm import transports
from echelon.comm.transports.messages import SHARED_FROM
from echelon.comm.transports.shared import SharedTransport
from echelon.comm.transports.staged import StagedTransport
from tests.comm.data import DTYPES, operations_of
from tests.comm.test_operations import MOVING, RANKS, REDUCING, Case, check, dtype_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
WAYS = ("shared", "staged")
DEVICE = torch.device("cuda", 0)
LARGE = 11 * 2**20 + 3  # elements of fp32: several chunks, and several halves of a mailbox
STEPS = 4


def choose(way: str, group: dist.ProcessGroup | None = None) -> None:
    """Send the group's tensors that way."""
    transports.messages.SHARED_FROM = SHARED_FROM if way == "shared" else math.inf
    roads = (group or dist.group.WORLD)._roads
    devices = roads._devices_of("mpi")
    devices.close()
    roads._open = {(road, device): way for (road, device), way in roads._open.items() if device is None}
    if way == "staged":
        devices._collectives[DEVICE] = devices.for_messages(DEVICE)
    dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
    kind = {"shared": SharedTransport, "staged": StagedTransport}[way]
    assert type(devices._collectives[DEVICE]) is kind


def every_dtype(way: str, operation: str, reducing: bool) -> int:
    choose(way)
    count = 0
    for dtype in DTYPES:
        for op in operations_of(dtype) if reducing else ("SUM",):
            for asynchronous in (False, True):
                check(operation, dtype, asynchronous, list(range(RANKS)), None, op, "cuda")
                count += 1
    return count


def in_a_subgroup(way: str) -> None:
    members = [0, 2, 3]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        choose(way, group)
        for function in (*MOVING, *REDUCING):
            function(Case(dtype_of("bfloat16"), True, members, group, "SUM", "cuda"))


def large(way: str) -> None:
    choose(way)
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(LARGE, device=DEVICE, dtype=torch.float32).remainder_(97).add_(rank)
    expected = torch.arange(LARGE, device=DEVICE, dtype=torch.float32).remainder_(97) * size + sum(range(size))
    dist.all_reduce(y := x.clone())
    assert torch.equal(y, expected)
    dist.all_gather_into_tensor(whole := torch.empty(size * LARGE, device=DEVICE), x)
    for r in range(size):
        assert torch.equal(whole[r * LARGE : (r + 1) * LARGE], x - rank + r)
    dist.reduce_scatter_tensor(out := torch.empty(LARGE, device=DEVICE), whole)
    assert torch.equal(out, (x - rank + rank) * size)
    dist.broadcast(y := x.clone(), 1)
    assert torch.equal(y, x - rank + 1)
    low = x.to(torch.bfloat16)
    dist.all_reduce(total := low.clone())
    gathered = torch.empty(size * LARGE, dtype=torch.bfloat16, device=DEVICE)
    dist.all_gather_into_tensor(gathered, low)
    assert torch.equal(total, gathered.view(size, LARGE).float().sum(0).to(torch.bfloat16))


def streams(way: str) -> None:
    """Behind what precedes on the caller's stream, before what follows, and without waiting for any other stream."""
    choose(way)
    size = dist.get_world_size()
    mine, busy = torch.cuda.Stream(), torch.cuda.Stream()
    end = torch.cuda.Event()

    def reduced(asynchronous: bool) -> Tensor:
        with torch.cuda.stream(mine):
            x = torch.zeros(2**20, device=DEVICE)
            torch.cuda._sleep(20_000_000)
            x += 1  # late: an operation that did not wait for the stream would see zeros
            work = dist.all_reduce(x, async_op=asynchronous)
            if work is not None:
                work.wait()
            return x * 2

    reduced(True)  # the first use of a kernel, or of memory, waits for the device
    dist.barrier()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(3_000_000_000)  # a second or two
        end.record()
    results = [reduced(asynchronous) for asynchronous in (False, True)]
    assert not end.query(), "the device was synchronised"
    mine.synchronize()
    for result in results:
        assert result.unique().tolist() == [2.0 * size]
    busy.synchronize()


def several_streams(way: str) -> None:
    """Operations called on different streams, waited for in another order."""
    choose(way)
    size = dist.get_world_size()
    each = []
    for number in range(6):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000 * (6 - number))
            x = torch.full((100_000,), float(number), device=DEVICE)
            each.append((stream, x, dist.all_reduce(x, async_op=True)))
    for number, (stream, x, work) in reversed(list(enumerate(each))):
        with torch.cuda.stream(stream):
            work.wait()
            assert x.unique().tolist() == [float(number * size)]


def futures(way: str) -> None:
    choose(way)
    work = dist.all_reduce(x := torch.ones(2**22, device=DEVICE), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().unique().tolist() == [2.0 * dist.get_world_size()]
    assert work.wait()
    assert x.unique().tolist() == [float(dist.get_world_size())]


def messages(way: str) -> None:
    choose(way)
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    sizes = (1, 1000, 2**20 + 1, LARGE)
    buffers = [torch.zeros(count, device=DEVICE) for count in sizes]
    operations = [dist.P2POp(dist.isend, torch.full((n,), float(rank + n), device=DEVICE), to) for n in sizes]
    operations += [dist.P2POp(dist.irecv, buffer, source) for buffer in buffers]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert [buffer.unique().tolist() for buffer in buffers] == [[float(source + n)] for n in sizes]
    strided = torch.zeros(50, 2, device=DEVICE)[:, 0]
    sent = dist.isend(torch.full((50,), float(rank), device=DEVICE), to, tag=3)
    dist.recv(strided, source, tag=3)
    sent.wait()
    assert strided.unique().tolist() == [float(source)]
    if rank == 0:
        seen = {dist.recv(x := torch.zeros(2**21, device=DEVICE)): x.unique().tolist() for _ in range(size - 1)}
        assert seen == {r: [float(r)] for r in range(1, size)}
    else:
        dist.send(torch.full((2**21,), float(rank), device=DEVICE), 0)
    tags = range(10, 19)  # more messages than an outbox has slots
    many = [dist.isend(torch.full((2**20,), float(tag), device=DEVICE), to, tag=tag) for tag in tags]
    for tag in reversed(tags):
        dist.recv(x := torch.zeros(2**20, device=DEVICE), source, tag=tag)
        assert x.unique().tolist() == [float(tag)]
    for work in many:
        work.wait()
    readers = dist.group.WORLD._roads._devices_of("mpi").for_messages(DEVICE)._messages._readers
    assert bool(readers) == (way == "shared")
    assert all(readers.values())


def messages_and_streams(way: str) -> None:
    """A message comes after what precedes on the sender's stream, and before what follows on the receiver's."""
    choose(way)
    rank = dist.get_rank()
    mine, busy = torch.cuda.Stream(), torch.cuda.Stream()
    end = torch.cuda.Event()

    def pass_on(count: int) -> None:
        with torch.cuda.stream(mine):
            x = torch.zeros(count, device=DEVICE)
            torch.cuda._sleep(20_000_000)
            if rank == 0:
                x += 1
                dist.send(x, 1)
            elif rank == 1:
                dist.recv(x, 0)
                x *= 2
                assert x.unique().tolist() == [2.0]

    for count in (1000, LARGE):
        pass_on(count)
    dist.barrier()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(3_000_000_000)
        end.record()
    for count in (1000, LARGE):
        pass_on(count)
    assert not end.query(), "the device was synchronised"
    busy.synchronize()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)).to(DEVICE)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 64, generator=generator).to(DEVICE), torch.randn(16, 32, generator=generator).to(DEVICE)


def train(model: nn.Module, rank: int, size: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # TP mixes DTensors and tensors
    for step in range(STEPS):
        x, y = (part.chunk(size)[rank] for part in batch(step))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def training(way: str, strategy: str) -> float:
    """The largest difference from one process that sees the whole batch."""
    choose(way)
    rank, size = dist.get_rank(), dist.get_world_size()
    if strategy == "ddp":
        parameters = train(DistributedDataParallel(net(), bucket_cap_mb=0.01), rank, size)
    elif strategy == "fsdp2":
        model, mesh = net(), DeviceMesh.from_group(dist.group.WORLD, "cuda")
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        parameters = train(fully_shard(model, mesh=mesh), rank, size)
    else:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parameters = train(parallelize_module(net(), mesh, plan), 0, 1)
    alone = train(net(), 0, 1)
    return max(float((a - b).abs().max()) for a, b in zip(parameters, alone, strict=True))


BODIES = (large, streams, several_streams, futures, messages, messages_and_streams)
ways = pytest.mark.parametrize("way", WAYS)


@ways
@pytest.mark.parametrize("operation", [*MOVING, *REDUCING], ids=lambda function: function.__name__)
def test_operation(ranks, operation, way):
    counts = ranks(RANKS, every_dtype, way, operation.__name__, operation in REDUCING, timeout=120)
    assert min(counts) >= 2 * len(DTYPES)


@ways
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "body", [large, streams, several_streams, futures, messages, messages_and_streams], ids=lambda body: body.__name__
)
def test_body(ranks, body, size, way):
    ranks(size, body, way, timeout=120)


@ways
def test_in_a_subgroup(ranks, way):
    ranks(4, in_a_subgroup, way, timeout=120)


@ways
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tensor"])
def test_training_equals_one_process(ranks, strategy, size, way):
    assert max(ranks(size, training, way, strategy, timeout=120)) < 1e-5
