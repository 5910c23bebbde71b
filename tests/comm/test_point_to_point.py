"""Messages: tags, any source, batches, and that they never wait behind a collective."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.comm.data import DTYPES, assert_same, dtype_of, values


def ring(dtype: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = values(rank, 9, dtype_of(dtype)), torch.zeros(9, dtype=dtype_of(dtype))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, y, (rank - 1) % size)]
    )
    for work in works:
        work.wait()
    assert_same(y, values((rank - 1) % size, 9, dtype_of(dtype)))


def tags() -> None:
    """Messages with different tags are received in the order of the receiver's choice."""
    if dist.get_rank() == 0:
        works = [dist.isend(torch.full((4,), float(tag)), 1, tag=tag) for tag in (5, 6, 7)]
        for work in works:
            work.wait()
    else:
        for tag in (7, 5, 6):
            x = torch.zeros(4)
            assert dist.recv(x, 0, tag=tag) == 0
            assert x.tolist() == [float(tag)] * 4


def any_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            x = torch.zeros(1)
            source = dist.recv(x)
            assert x.item() == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)


def any_source_in_subgroup() -> None:
    """The source is reported by its rank in the world."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 1:
        x = torch.zeros(1)
        assert dist.recv(x, group=group) == 2
        assert x.item() == 5
    elif dist.get_rank() == 2:
        dist.send(torch.tensor([5.0]), 1, group=group)


def to_oneself() -> None:
    x, y = torch.arange(5.0), torch.zeros(5)
    receive = dist.irecv(y, dist.get_rank())
    send = dist.isend(x, dist.get_rank())
    send.wait()
    receive.wait()
    assert_same(y, x)


def ahead_of_a_collective() -> None:
    """Rank 0 starts a collective, then sends; rank 1 joins the collective only when it has the message."""
    x = torch.ones(4)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(torch.tensor([7.0]), 1)
        work.wait()
    else:
        message = torch.zeros(1)
        dist.recv(message, 0)
        assert message.item() == 7
        dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4


def large_without_a_waiter() -> None:
    """A large message moves although its sender waits only for news that come by another way."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        work = dist.isend(torch.full((2**21,), 3.0), 1)
        store.wait(["arrived"], timedelta(seconds=30))
        work.wait()
        store.delete_key("arrived")
    else:
        x = torch.zeros(2**21)
        dist.recv(x, 0)
        store.set("arrived", "")
        assert (x == 3).all()


def unmatched_receive_times_out() -> str:
    if dist.get_rank() == 0:
        x = torch.zeros(1)
        work = dist.irecv(x, 1, tag=9)
        try:
            work.wait(timedelta(milliseconds=50))
        except dist.DistBackendError as error:
            message = str(error)
        assert not work.is_completed()
        dist.barrier()
        work.wait()
        assert x.item() == 1
        return message
    dist.barrier()
    dist.send(torch.ones(1), 0, tag=9)
    return ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_ring(ranks, dtype):
    ranks(3, ring, dtype)


def test_tags(ranks):
    ranks(2, tags)


def test_any_source(ranks):
    ranks(4, any_source)


def test_any_source_in_subgroup(ranks):
    ranks(3, any_source_in_subgroup)


def test_to_oneself(ranks):
    ranks(2, to_oneself)


def test_ahead_of_a_collective(ranks):
    ranks(2, ahead_of_a_collective)


def test_large_without_a_waiter(ranks):
    ranks(2, large_without_a_waiter)


def test_unmatched_receive_times_out(ranks):
    assert "not complete after 0.05 s" in ranks(2, unmatched_receive_times_out)[0]
