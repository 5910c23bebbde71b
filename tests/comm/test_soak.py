"""Many small operations in one life: nothing is kept that should be let go."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

PHASES = 10
WARM_UP = 3  # phases in which caches, threads and allocators may still grow
ALLOWED = 2 * 2**20  # bytes: in 200,000 operations, ten each


def soak(operations: int) -> list[int]:
    """The rank's memory after each phase, with all kinds of calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    x, y, whole = torch.ones(8), torch.ones(8), torch.ones(8 * size)
    memory = []
    for _ in range(PHASES):
        for _ in range(operations // PHASES // 8):
            dist.all_reduce(x, dist.ReduceOp.MAX)
            works = [dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True) for _ in range(2)]
            works[0].get_future().wait()
            works[1].wait()
            dist.broadcast(x, 0)
            dist.all_gather_into_tensor(whole, x)
            dist.reduce_scatter_tensor(x, whole, dist.ReduceOp.MAX)
            sent = dist.isend(x, to)
            dist.recv(y, source)
            sent.wait()
        gc.collect()
        memory.append(resident())
    return memory


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def groups_come_and_go() -> list[int]:
    """The same for groups."""
    memory = []
    for _ in range(PHASES):
        for _ in range(20):
            group = dist.new_group()
            dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()
            dist.destroy_process_group(group)
        gc.collect()
        memory.append(resident())
    return memory


def assert_flat(histories: list[list[int]]) -> None:
    for rank, memory in enumerate(histories):
        grown = memory[-1] - memory[WARM_UP]
        assert grown < ALLOWED, f"rank {rank} grew by {grown:,} bytes: {memory}"


def test_short_soak(ranks):
    assert_flat(ranks(2, soak, 20_000, timeout=120))


@pytest.mark.slow
def test_soak(ranks):
    assert_flat(ranks(2, soak, 200_000, timeout=600))


def test_groups_come_and_go(ranks):
    assert_flat(ranks(3, groups_come_and_go, timeout=120))
