"""Tensors of every kind: not contiguous, empty, scalar, large, low-precision; and what a dtype cannot do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from echelon.comm.routes import EXCHANGED
from tests.comm.data import FLOATS, assert_same, dtype_of, values


def strided() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    base = [values(r, 24, torch.float32).view(4, 6) for r in range(size)]
    total = torch.stack(base).sum(0)

    x = base[rank].clone().t()
    dist.all_reduce(x)
    assert_same(x.contiguous(), total.t().contiguous())

    x = base[rank].clone()[:, ::2]
    dist.broadcast(x, 1)
    assert_same(x.contiguous(), base[1][:, ::2].contiguous())

    x = base[rank].clone().t()
    dist.reduce(x, 0)
    assert_same(x.contiguous(), (total if rank == 0 else base[rank]).t().contiguous())

    out = [torch.zeros(6, 4).t() for _ in range(size)]
    dist.all_gather(out, base[rank].t().contiguous().t())
    for got, expected in zip(out, base, strict=True):
        assert_same(got.contiguous(), expected)

    whole = torch.zeros(size * 2, 6).t().contiguous().t()[::2]
    dist.all_gather_into_tensor(whole, base[rank][0])
    assert_same(whole.contiguous(), torch.stack([b[0] for b in base]))

    out = torch.zeros(6, 4).t()
    dist.reduce_scatter(out, [b.clone().t().contiguous().t() for b in base])
    assert_same(out.contiguous(), base[rank] * size)

    peer = rank ^ 1
    x = torch.zeros(6, 4).t()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, base[rank].t().contiguous().t(), peer), dist.P2POp(dist.irecv, x, peer)]
    )
    for work in works:
        work.wait()
    assert_same(x.contiguous(), base[peer])


def empty_and_scalar() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    nothing = torch.zeros(0, 3)
    for dtype in (torch.float32, torch.bfloat16):
        x = nothing.to(dtype)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([x.clone() for _ in range(size)], x)
        dist.all_gather_into_tensor(x.clone(), x)
        dist.reduce_scatter_tensor(x.clone(), x)
        dist.all_to_all_single(x.clone(), x)
        assert x.shape == (0, 3)
    if rank == 0:
        dist.send(nothing, 1)
    elif rank == 1:
        dist.recv(nothing.clone(), 0)
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        scalar = torch.tensor(1).to(dtype)
        dist.all_reduce(scalar)
        assert_same(scalar, torch.tensor(size).to(dtype))
        out = torch.zeros(size, dtype=dtype)
        dist.all_gather_into_tensor(out, torch.tensor(rank % 2).to(dtype))
        assert_same(out, torch.tensor([r % 2 for r in range(size)]).to(dtype))


def overlapping() -> None:
    """Inputs that are part of the outputs, in their own place (as FSDP2 has them) or another, on some ranks only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for place in (rank, 0):
        whole = torch.zeros(4 * size)
        mine = whole[4 * place : 4 * place + 4].fill_(rank + 1)
        dist.all_gather_into_tensor(whole, mine)
        assert whole.tolist() == [r + 1.0 for r in range(size) for _ in range(4)]

        whole = torch.full((4 * size,), float(rank + 1))
        out = whole[4 * place : 4 * place + 4] if rank % 2 else torch.zeros(4)
        dist.reduce_scatter_tensor(out, whole)
        assert out.tolist() == [size * (size + 1) / 2] * 4

    x = torch.arange(float(size)) + 10 * rank
    dist.all_to_all_single(x, x)
    assert x.tolist() == [10.0 * r + rank for r in range(size)]


def without_autograd() -> None:
    """Communication moves numbers: no graph grows through it, in no mode and at no size."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (4, 40_000):
        x = torch.full((count,), float(rank), requires_grad=True)
        out = [torch.zeros(count) for _ in range(size)]
        for asynchronous in (False, True):
            work = dist.all_gather(out, x, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert not any(o.requires_grad for o in out)
        whole = torch.zeros(size * count)
        dist.all_to_all_single(whole, x.repeat(size), [count] * size, [count] * size)
        assert not whole.requires_grad
        parameter = torch.nn.Parameter(torch.zeros(count))
        dist.scatter(parameter, [torch.ones(count) * r for r in range(size)] if rank == 0 else None, 0)
        assert (parameter == rank).all()
        for dtype in (torch.bfloat16, torch.float8_e5m2):
            parameter = torch.nn.Parameter(torch.ones(count).to(dtype))
            dist.all_reduce(parameter)
            assert (parameter.float() == size).all()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        for dtype in (torch.float32, torch.bfloat16):
            with torch.inference_mode():
                x = torch.full((8,), 2.0).to(dtype)
                dist.all_reduce(x, op, async_op=True).wait()
                assert (x == (2 * size if op == dist.ReduceOp.SUM else 2)).all()


def splits_on_some_ranks() -> None:
    """Whether it names its splits is each rank's own choice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(size)
    splits = [1] * size if rank % 2 else None
    dist.all_to_all_single(out, torch.full((size,), float(rank)), splits, splits)
    assert out.tolist() == [float(r) for r in range(size)]


def leaf() -> None:
    """Parameters that want gradients can be reduced and broadcast in place, whatever their layout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for x in (torch.full((2, 3), float(rank)), torch.full((3, 2), float(rank)).t()):
        parameter = torch.nn.Parameter(x)
        dist.all_reduce(parameter, dist.ReduceOp.AVG)
        assert_same(parameter.detach().contiguous(), torch.full((2, 3), (size - 1) / 2))
        dist.broadcast(parameter, 0)


def rounds_once(dtype: str, count: int) -> None:
    """The sum of random low-precision numbers is the fp32 sum, rounded once: equal to the last bit on every rank."""
    size = dist.get_world_size()
    kind = dtype_of(dtype)
    inputs = [torch.randn(count, generator=torch.Generator().manual_seed(r)).to(kind) for r in range(size)]
    total = inputs[0].float()
    for x in inputs[1:]:
        total += x.float()
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / size)):
        x = inputs[dist.get_rank()].clone()
        dist.all_reduce(x, op)
        assert_same(x, expected.to(kind))
        out = torch.empty(count // size * 1, dtype=kind)
        dist.reduce_scatter_tensor(out, inputs[dist.get_rank()][: count // size * size], op)
        mine = slice(dist.get_rank() * (count // size), (dist.get_rank() + 1) * (count // size))
        assert_same(out, expected[mine].to(kind))


def large(dtype: str) -> None:
    """Past the sizes where algorithms change."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 3 * 2**18 // size * size
    kind = dtype_of(dtype)
    inputs = [values(r, count, kind) for r in range(size)]
    total = torch.stack([x.double() for x in inputs]).sum(0)
    x = inputs[rank].clone()
    dist.all_reduce(x)
    assert_same(x, total.to(kind))
    out = torch.empty(count // size, dtype=kind)
    dist.reduce_scatter_tensor(out, inputs[rank])
    assert_same(out, total.chunk(size)[rank].to(kind))
    whole = torch.empty(count * size, dtype=kind)
    dist.all_gather_into_tensor(whole, inputs[rank])
    assert_same(whole, torch.cat(inputs))
    parts = [torch.empty(count, dtype=kind) for _ in range(size)]
    dist.all_gather(parts, inputs[rank])
    assert_same(torch.cat(parts), whole)
    often = EXCHANGED["reduce"] // whole.nbytes + 1
    others = torch.stack([torch.cat(inputs[r:] + inputs[:r]).double() for r in range(size)])
    for op, reduced in ((dist.ReduceOp.SUM, others.sum(0)), (dist.ReduceOp.MAX, others.amax(0))):
        x = others[rank].to(kind).repeat(often)
        dist.reduce(x, 1, op)
        assert_same(x, (reduced if rank == 1 else others[rank]).to(kind).repeat(often))


def premultiplied() -> None:
    """Each rank multiplies by a factor of its own before the sum, as NCCL does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    make = torch._C._distributed_c10d._make_nccl_premul_sum
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        expected = sum(values(r, 8, dtype) * (r + 1) for r in range(size))
        for factor in (float(rank + 1), torch.tensor([float(rank + 1)])):
            x = values(rank, 8, dtype)
            dist.all_reduce(torch.view_as_real(x) if dtype.is_complex else x, make(factor))
            assert_same(x, expected)
        if not dtype.is_complex:
            whole = values(rank, 8 * size, dtype)
            out = torch.empty(8, dtype=dtype)
            dist.reduce_scatter_tensor(out, whole, make(float(rank + 1)))
            assert_same(out, sum((values(r, 8 * size, dtype) * (r + 1)).chunk(size)[rank] for r in range(size)))
            assert_same(whole, values(rank, 8 * size, dtype))


def premultiplied_fp8() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), 2.0).to(torch.float8_e5m2)
    dist.all_reduce(x, torch._C._distributed_c10d._make_nccl_premul_sum(float(rank + 1)))
    assert x.float().tolist() == [size * (size + 1.0)] * 4


def complex_product() -> None:
    """PyTorch's front end refuses it; the group itself has it."""
    x = torch.full((3,), 1j, dtype=torch.complex64)
    dist.group.WORLD.allreduce([x], dist.ReduceOp.PRODUCT).wait()
    assert_same(x, torch.full((3,), 1j ** dist.get_world_size(), dtype=torch.complex64))


def refusals() -> list[str]:
    messages = []
    for dtype, op in (
        (torch.float32, dist.ReduceOp.BAND),
        (torch.int64, dist.ReduceOp.AVG),
        (torch.bool, dist.ReduceOp.AVG),
        (torch.bfloat16, dist.ReduceOp.BXOR),
    ):
        try:
            dist.all_reduce(torch.ones(2).to(dtype), op)
        except TypeError as error:
            messages.append(str(error))
    for call in (
        lambda: dist.group.WORLD.allgather([[torch.ones(1)]], [torch.ones(1)]),
        lambda: dist.group.WORLD._allgather_base(torch.ones(3), torch.ones(1)),
        lambda: dist.group.WORLD.alltoall_base(torch.ones(3), torch.ones(3), [], []),
        lambda: dist.group.WORLD.alltoall_base(torch.ones(3), torch.ones(3), [1, 1], [2, 2]),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    dist.all_reduce(torch.ones(1))
    return messages


def past_32_bits() -> None:
    """More elements than a 32-bit count can say, through each kind of path: reduced, moved, sent."""
    rank = dist.get_rank()
    count = 2**31 + 5
    x = torch.zeros(count, dtype=torch.int8)
    x[0], x[2**31 - 1], x[-1] = 1, 2, 3 + rank
    dist.all_reduce(x)
    assert [int(x[i]) for i in (0, 1, 2**31 - 1, -1)] == [2, 0, 4, 7]
    x[-2] = 10 + rank
    dist.broadcast(x, 1)
    assert int(x[-2]) == 11
    x[-1] = 20 + rank
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        assert int(x[-1]) == 20
    x[-1] = 30 + rank
    whole = torch.empty(2 * count, dtype=torch.int8)
    dist.all_gather_into_tensor(whole, x)
    assert [int(whole[i]) for i in (count - 1, 2 * count - 1)] == [30, 31]
    out = [torch.empty(count, dtype=torch.int8), torch.empty(3, dtype=torch.int8)]
    del whole
    dist.all_gather(out, x if rank == 0 else torch.full((3,), 7, dtype=torch.int8))
    assert int(out[0][-1]) == 30
    assert out[1].tolist() == [7, 7, 7]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_empty_and_scalar(ranks, size):
    ranks(size, empty_and_scalar)


@pytest.mark.parametrize("size", [2, 4])
def test_strided(ranks, size):
    ranks(size, strided)


@pytest.mark.parametrize("size", [2, 3])
def test_overlapping(ranks, size):
    ranks(size, overlapping)


@pytest.mark.parametrize("size", [2, 3])
def test_without_autograd(ranks, size):
    ranks(size, without_autograd)


def test_splits_on_some_ranks(ranks):
    ranks(3, splits_on_some_ranks)


def test_leaf(ranks):
    ranks(2, leaf)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("count", [100, 100_003])
@pytest.mark.parametrize("dtype", FLOATS[2:])
def test_low_precision_rounds_once(ranks, size, count, dtype):
    ranks(size, rounds_once, dtype, count)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int64", "uint16", "uint64"])
def test_large(ranks, size, dtype):
    ranks(size, large, dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_premultiplied(ranks, size):
    ranks(size, premultiplied)


def test_premultiplied_fp8(ranks):
    ranks(3, premultiplied_fp8)


def test_complex_product(ranks):
    ranks(3, complex_product)


def test_refusals(ranks):
    messages = ranks(2, refusals)[0]
    assert [message.split(":")[0] for message in messages[:4]] == [
        "BAND is for integers and booleans, not torch.float32",
        "AVG of torch.int64 would not be exact",
        "AVG of torch.bool has no meaning",
        "BXOR is for integers and booleans, not torch.bfloat16",
    ]
    assert "one tensor for each of the 2 ranks, but has 1" in messages[4]
    assert "must hold 2 × 1 elements" in messages[5]
    assert "3 rows, which 2 ranks cannot share equally" in messages[6]
    assert "must be 2 numbers that add up to the output's 3 rows" in messages[7]


@pytest.mark.slow
def test_past_32_bits(ranks):
    ranks(2, past_32_bits, timeout=300)
