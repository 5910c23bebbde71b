"""Groups and what is built on them: subgroups, splits, coalesced forms, objects, functional collectives, barriers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager


def members_alone() -> None:
    """Ranks 1 and 2 make a group while 0 and 3 do nothing at all."""
    rank = dist.get_rank()
    if rank in (1, 2):
        group = dist.new_group([1, 2], use_local_synchronization=True)
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        assert x.item() == 3
        assert group.group_name != dist.group.WORLD.group_name
        assert dist.get_backend(group) == "echelon"


def many_groups() -> None:
    """Communicators are given back: MPI has only a few thousand."""
    for _ in range(300):
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)


def destroyed_in_any_order() -> None:
    """One rank destroys a group at once, the others when they have done something else together."""
    first, second = dist.new_group(), dist.new_group()
    for group in (first, second):
        dist.barrier(group)
    if dist.get_rank() == 0:
        dist.destroy_process_group(first)
        dist.barrier()
        dist.destroy_process_group(second)
    else:
        dist.barrier()
        dist.destroy_process_group(second)
        dist.destroy_process_group(first)
    dist.barrier()


def mesh() -> None:
    """A mesh of named dimensions is made of Echelon's groups."""
    rank = dist.get_rank()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=grid.get_group("columns"))
    assert x.item() == (1 if rank < 2 else 5)
    dist.all_reduce(x, group=grid.get_group("rows"))
    assert x.item() == 6
    assert dist.get_backend(grid.get_group("rows")) == "echelon"
    assert not grid.get_group("rows")._get_backend(torch.device("cpu")).supports_splitting


def after_destroy() -> str:
    group = dist.new_group()
    dist.barrier(group)
    handle = group
    dist.destroy_process_group(group)
    try:
        handle.allreduce([torch.ones(1)])
    except RuntimeError as error:
        return str(error)
    return ""


def split() -> None:
    rank = dist.get_rank()
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=half)
    assert x.item() == (1 if rank < 2 else 5)
    assert dist.split_group(split_ranks=[[0], [1]]) is None or rank < 2
    if rank >= 2:  # the ranks of a split are those within its parent
        single = dist.split_group(half, [[1], [0]])
        assert dist.get_process_group_ranks(single) == [rank]


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for asynchronous in (False, True):
        tensors = [torch.full((n,), float(rank + n)) for n in (1, 5, 9)]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for x in tensors:
                dist.all_reduce(x)
        if asynchronous:
            manager.wait()
        for n, x in zip((1, 5, 9), tensors, strict=True):
            assert (x == sum(r + n for r in range(size))).all()

        inputs = [torch.full((n,), float(rank)) for n in (2, 3)]
        outputs = [torch.zeros(n * size) for n in (2, 3)]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for x, y in zip(inputs, outputs, strict=True):
                dist.all_gather_into_tensor(y, x)
        if asynchronous:
            manager.wait()
        for n, y in zip((2, 3), outputs, strict=True):
            assert y.tolist() == [float(r) for r in range(size) for _ in range(n)]

        outputs = [torch.zeros(n) for n in (2, 3)]
        with _coalescing_manager(async_ops=asynchronous) as manager:
            for n, y in zip((2, 3), outputs, strict=True):
                dist.reduce_scatter_tensor(y, torch.full((n * size,), float(rank)))
        if asynchronous:
            manager.wait()
        assert all((y == sum(range(size))).all() for y in outputs)

    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), -float(rank))])
    for r, (first, second) in enumerate(lists):
        assert first.tolist() == [float(r)] * 2
        assert second.tolist() == [-float(r)] * 3


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    thing = {"rank": rank, "text": "x" * rank}
    out = [None] * size
    dist.all_gather_object(out, thing)
    assert [o["rank"] for o in out] == list(range(size))
    out = [None] * size if rank == 1 else None
    dist.gather_object(thing, out, dst=1)
    assert rank != 1 or [len(o["text"]) for o in out] == list(range(size))
    things = [thing, rank]
    dist.broadcast_object_list(things, src=2)
    assert things == [{"rank": 2, "text": "xx"}, 2]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([thing], dst=1)
    elif rank == 1:
        box = [None]
        dist.recv_object_list(box, src=0)
        assert box == [{"rank": 0, "text": ""}]


def functional_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    x = torch.full((4,), float(rank + 1))
    total = size * (size + 1) / 2
    assert (functional.all_reduce(x, "sum", group) == total).all()
    assert (functional.all_reduce(x, "avg", group) == total / size).all()
    assert (x == rank + 1).all()
    assert functional.all_gather_tensor(x, 0, group).tolist() == [float(r + 1) for r in range(size) for _ in range(4)]
    assert functional.all_gather_tensor(x.view(2, 2), 1, group).shape == (2, 2 * size)
    assert (
        functional.reduce_scatter_tensor(torch.full((4 * size,), float(rank)), "sum", 0, group) == sum(range(size))
    ).all()
    assert functional.broadcast(x, 0, group).tolist() == [1.0] * 4
    splits = [1] * size
    swapped = functional.all_to_all_single(torch.full((size,), float(rank)), splits, splits, group)
    assert swapped.tolist() == [float(r) for r in range(size)]
    both = functional.all_reduce_coalesced([x, 2 * x], "sum", group)
    assert [t[0].item() for t in both] == [total, 2 * total]
    gathered = functional.all_gather_into_tensor_coalesced([x, 2 * x], group)
    assert gathered[1].tolist() == [2.0 * (r + 1) for r in range(size) for _ in range(4)]
    scattered = functional.reduce_scatter_tensor_coalesced(
        [torch.ones(size), torch.ones(2 * size)], "sum", [0, 0], group
    )
    assert [t.tolist() for t in scattered] == [[float(size)], [float(size)] * 2]
    weights = torch.full((4,), 2.0, requires_grad=True)
    functional.all_reduce(weights * rank, "sum", group)


def older_and_newer_names() -> None:
    """torch 2.11 calls some methods by other names than 2.13; shorter signatures take a root or an operation."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    one = torch.full((2,), float(rank))
    for gather in (group._allgather_base, group.all_gather_single):
        out = torch.zeros(2 * size)
        gather(out, one).wait()
        assert out.tolist() == [float(r) for r in range(size) for _ in range(2)]
    for gather in (group.allgather_into_tensor_coalesced, group.all_gather_single_coalesced):
        out = torch.zeros(2 * size)
        gather([out], [one]).wait()
        assert out[-1].item() == size - 1
    for scatter in (group._reduce_scatter_base, group.reduce_scatter_single):
        out = torch.zeros(1)
        scatter(out, torch.ones(size)).wait()
        assert out.item() == size
    for scatter in (group.reduce_scatter_tensor_coalesced, group.reduce_scatter_single_coalesced):
        out = torch.zeros(1)
        scatter([out], [torch.ones(size)]).wait()
        assert out.item() == size
    for swap in (group.alltoall_base, group.all_to_all_single):
        out = torch.zeros(size)
        swap(out, torch.full((size,), float(rank)), [], []).wait()
        assert out.tolist() == [float(r) for r in range(size)]
    x = torch.full((2,), float(rank))
    group.allreduce(x, dist.ReduceOp.MAX).wait()
    assert x.tolist() == [size - 1.0] * 2
    x = torch.full((2,), float(rank))
    group.reduce(x, 0, dist.ReduceOp.MAX).wait()
    assert x.tolist() == [size - 1.0 if rank == 0 else float(rank)] * 2
    x, y = torch.full((2,), float(rank)), torch.full((3,), -float(rank))
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.MAX, False
    assert group.allreduce([x, y], options) is None
    assert (x.tolist(), y.tolist()) == ([size - 1.0] * 2, [0.0] * 3)
    group.broadcast(one, root=1).wait()
    assert one.tolist() == [1.0] * 2
    group.barrier().wait()


def barriers() -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)


def barrier_without(absent: list[int], wait_all_ranks: bool) -> str:
    message = ""
    group = dist.new_group()
    if dist.get_rank() not in absent:
        try:
            dist.monitored_barrier(group, timedelta(seconds=0.3), wait_all_ranks)
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


def reinitialised() -> None:
    """Destroy everything and begin again, with the name that PyTorch's wheels refuse."""
    for _ in range(2):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("mpi")
        assert dist.get_backend() == "echelon"
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == dist.get_world_size()
    assert dist.is_mpi_available()


def test_members_alone(ranks):
    ranks(4, members_alone)


def test_many_groups(ranks):
    ranks(2, many_groups)


def test_destroyed_in_any_order(ranks):
    ranks(3, destroyed_in_any_order)


def test_mesh(ranks):
    ranks(4, mesh)


def test_after_destroy(ranks):
    assert all("was destroyed" in message for message in ranks(2, after_destroy))


def test_split(ranks):
    ranks(4, split)


def test_coalesced(ranks):
    ranks(3, coalesced)


def test_objects(ranks):
    ranks(4, objects)


def test_functional_collectives(ranks):
    ranks(3, functional_collectives)


def test_older_and_newer_names(ranks):
    ranks(2, older_and_newer_names)


def test_barriers(ranks):
    ranks(4, barriers)


@pytest.mark.parametrize(
    ("absent", "wait_all", "named"),
    [([2], False, "Rank 2 failed"), ([1, 3], True, "Ranks 1, 3 failed"), ([0], False, "Rank 0 failed")],
)
def test_monitored_barrier_names_the_absent(ranks, absent, wait_all, named):
    messages = ranks(4, barrier_without, absent, wait_all)
    for rank, message in enumerate(messages):
        assert (named in message) == (rank not in absent), message


def test_reinitialised(ranks):
    ranks(3, reinitialised)
