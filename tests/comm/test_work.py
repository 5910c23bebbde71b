"""What a caller holds: waiting, timeouts, futures, and that each rank may choose for itself between sync and async."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def mixed_modes() -> None:
    """In each call some ranks are synchronous and some are not; and they wait in orders of their own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors, works = [], []
    for call in range(20):
        x = torch.full((100,), float(rank + call))
        work = dist.all_reduce(x, async_op=(rank + call) % 3 != 0)
        tensors.append(x)
        if work is not None:
            works.append(work)
    for work in works if rank % 2 else reversed(works):
        work.wait()
    for call, x in enumerate(tensors):
        assert (x == sum(r + call for r in range(size))).all()


def returns_at_once() -> None:
    """An asynchronous call returns while its peer has not come, and makes progress while nobody waits."""
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(2**20)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        store.set("go", "")
        deadline = time.monotonic() + 30
        while not work.is_completed():  # only looked at, never waited for
            assert time.monotonic() < deadline
            time.sleep(0.001)
        store.delete_key("go")
    else:
        store.wait(["go"])
        dist.all_reduce(x)
    assert (x == 2).all()


def wait_times_out() -> str:
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(1)
    message = ""
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        try:
            work.wait(timedelta(milliseconds=50))
        except dist.DistBackendError as error:
            message = str(error)
        store.set("late", "")
        work.wait(timedelta(seconds=30))
        store.delete_key("late")
    else:
        store.wait(["late"])
        dist.all_reduce(x)
    assert x.item() == 2
    return message


def futures() -> None:
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [4.0] * 3
    assert work.get_future() is future
    assert work.is_success()
    assert work.result()[0] is x
    late = dist.all_reduce(x, async_op=True)
    late.wait()
    assert late.get_future().wait()[0].tolist() == [4.0] * 3
    y = torch.zeros(1)
    peer = 1 - dist.get_rank()
    send, receive = dist.isend(torch.ones(1), peer), dist.irecv(y, peer)
    assert receive.get_future().wait()[0].item() == 1
    send.wait()


def waits_inside_callbacks() -> None:
    """Callbacks that start a collective and wait for it, as PowerSGD's do: no thread may wait for itself."""
    xs = [torch.full((4,), float(i)) for i in range(8)]

    def again(done: torch.futures.Future) -> torch.Tensor:
        [x] = done.value()
        return dist.all_reduce(x, async_op=True, group=group).get_future().wait()[0]

    group = dist.new_group()
    lock_step = dist.all_reduce(xs[0], async_op=True).get_future().then(again)
    assert lock_step.wait().tolist() == [0.0] * 4
    for i, x in enumerate(xs[1:], 1):
        result = dist.all_reduce(x, async_op=True).get_future().then(again)
        assert result.wait().tolist() == [4.0 * i] * 4


def errors_reach_the_waiter() -> None:
    """A message that does not fit is an error of the receiver, at wait and in the future, and harms nothing else."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(10), 1)
    else:
        work = dist.irecv(torch.zeros(2), 0)
        with pytest.raises(RuntimeError, match=r"(?i)trunc"):
            work.wait()
        assert work.exception() is not None
        with pytest.raises(RuntimeError, match=r"(?i)trunc"):
            work.get_future().wait()
    dist.barrier()


def from_many_threads() -> None:
    """Threads of one rank may use different groups at once (autograd's do)."""
    size = dist.get_world_size()
    groups = [dist.new_group() for _ in range(4)]
    wrong = []

    def use(group: dist.ProcessGroup) -> None:
        for call in range(50):
            x = torch.full((10,), float(call))
            work = dist.all_reduce(x, group=group, async_op=bool(call % 2))
            if work is not None:
                work.wait()
            if not (x == size * call).all():
                wrong.append(call)

    threads = [threading.Thread(target=use, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index * index), float(os.getpid())])


def forked_workers() -> None:
    """A DataLoader forks this rank, with its threads under way, and the rank goes on communicating."""
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(4)]
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        seen = torch.cat(list(loader))
        assert seen[:, 0].tolist() == [float(i * i) for i in range(16)]
        assert os.getpid() not in seen[:, 1].int().tolist()
        x = torch.ones(5)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all()
    for work in works:
        work.wait()


def forked_child_is_refused() -> None:
    """A forked child that communicates gets an error, not a hang; its end does not end the rank's MPI."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.isend(torch.ones(1), 0)):
            try:
                call()
            except RuntimeError as error:
                os.write(write, str(error).encode() + b"\n")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as lines:
        said = lines.read().splitlines()
    assert [line.split(":")[0] for line in said] == ["this process was forked from a rank and cannot communicate"] * 2
    dist.all_reduce(torch.ones(1))


def test_mixed_modes(ranks):
    ranks(4, mixed_modes)


def test_returns_at_once(ranks):
    ranks(2, returns_at_once)


def test_wait_times_out(ranks):
    assert "not complete after 0.05 s" in ranks(2, wait_times_out)[0]


def test_futures(ranks):
    ranks(2, futures)


def test_waits_inside_callbacks(ranks):
    ranks(2, waits_inside_callbacks)


def test_errors_reach_the_waiter(ranks):
    ranks(2, errors_reach_the_waiter)


def test_from_many_threads(ranks):
    ranks(2, from_many_threads)


def test_forked_workers(ranks):
    ranks(2, forked_workers)


def test_forked_child_is_refused(ranks):
    ranks(2, forked_child_is_refused)
