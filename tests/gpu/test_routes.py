"""Roads of CUDA tensors: NCCL where every rank has a GPU of its own (here: one rank), else over the host's roads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import echelon
from tests.comm.data import assert_same, dtype_of, op_of, operations_of, reduced, values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DTYPES = ("float32", "int64", "bfloat16")
COUNTS = (1, 33, 2**20 + 3)
ROADS = ("mpi", "gloo", "mpi+exchange", "mpi+ring", "mpi+two-level", "mpi+shared", "gloo+two-level")


def everything(group: dist.ProcessGroup, name: str, count: int, asynchronous: bool) -> None:
    me, size, dtype = group.rank(), group.size(), dtype_of(name)
    inputs = [values(rank, count, dtype) for rank in range(size)]
    blocks = [values(rank, size * count, dtype, seed=1) for rank in range(size)]

    def done(work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    common = {"group": group, "async_op": asynchronous}
    for op in operations_of(name)[:2]:
        done(dist.all_reduce(x := inputs[me].cuda(), op_of(op), **common))
        assert_same(x.cpu(), reduced(inputs, op))
        x = torch.empty(count, dtype=dtype, device="cuda")
        done(dist.reduce_scatter_tensor(x, blocks[me].cuda(), op_of(op), **common))
        assert_same(x.cpu(), reduced([block.view(size, count)[me] for block in blocks], op))
    x = torch.empty(size * count, dtype=dtype, device="cuda")
    done(dist.all_gather_into_tensor(x, inputs[me].cuda(), **common))
    assert_same(x.cpu(), torch.cat(inputs))
    done(dist.all_to_all_single(x, blocks[me].cuda(), **common))
    assert_same(x.cpu(), torch.cat([block.view(size, count)[me] for block in blocks]))
    done(dist.broadcast(x := inputs[me].cuda(), group_src=0, **common))
    assert_same(x.cpu(), inputs[0])


def over(road: str) -> str:
    """Returns what the record says of it."""
    group = dist.new_group()
    with echelon.comm.route(group, road), echelon.comm.record() as log:
        for name in DTYPES:
            for count in COUNTS:
                for asynchronous in (False, True):
                    everything(group, name, count, asynchronous)
    return log[0].transport


@pytest.mark.parametrize("road", ROADS)
def test_ranks_that_share_a_gpu_go_over_the_hosts_roads(ranks, road):
    for name in ranks(2, over, road, timeout=120):
        assert name.startswith(road.split("+", maxsplit=1)[0])


def refused() -> str:
    assert str(dist.group.WORLD.road("all_reduce", 4, device="cuda")) == "mpi"
    group = dist.new_group()
    echelon.comm.route(group, all_reduce="nccl")
    with pytest.raises(ValueError, match="all_reduce cannot go over nccl") as caught:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    return str(caught.value)


def test_nccl_is_refused_where_ranks_share_a_gpu(ranks):
    for text in ranks(2, refused):
        assert "NCCL wants a GPU for each rank" in text


def alone() -> None:
    """NCCL by default, mixed with MPI on the CPU and by choice, sync and async, in one order."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert group.place.own_gpus
    assert {str(group.road(name, 4, device="cuda")) for name in ("all_reduce", "all_to_all", "message")} == {"nccl"}
    assert str(group.road("all_reduce", 4)) == "mpi"
    for name in DTYPES:
        for asynchronous in (False, True):
            everything(group, name, 1000, asynchronous)
    x, y = torch.ones(1000, device="cuda"), torch.ones(1000)
    works = []
    for number in range(50):
        chosen = {"all_reduce": ("nccl", "mpi")[number % 2]} if number % 5 else {}
        with echelon.comm.route(group, **chosen):
            works.append(dist.all_reduce(x, group=group, async_op=True))
        works.append(dist.all_reduce(y, group=group, async_op=True) if number % 3 else None)
        x = x + 1
    for work in works:
        if work is not None:
            work.wait()
    assert x.unique().tolist() == [51.0]
    echelon.comm.route(group, all_reduce="nccl")
    with pytest.raises(ValueError, match="NCCL moves CUDA tensors, and this one is on the CPU"):
        dist.all_reduce(y, group=group)


def test_one_rank_with_a_gpu_of_its_own_goes_over_nccl(ranks):
    ranks(2, alone, timeout=120)
