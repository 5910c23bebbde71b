"""The pool itself: a test that fails, hangs or kills a rank harms only itself."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError, alive


def who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def process() -> int:
    return os.getpid()


def hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def fail() -> None:
    if dist.get_rank() == 0:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(1))


def test_ranks_are_started_once():
    pool = Pool(2)
    first = pool.run(process)
    assert pool.run(process) == first
    pool.stop()


@pytest.mark.parametrize(
    ("harm", "words"), [(hang, "rank 1: no answer"), (die, "rank 1: died"), (fail, "ValueError: on purpose")]
)
def test_harm_is_contained(harm, words, monkeypatch):
    monkeypatch.setattr("tests.pool.GRACE_SECONDS", 1)
    pool = Pool(2)
    before = pool.run(process)
    with pytest.raises(RankError, match=words):
        pool.run(harm, timeout=3)
    assert not [pid for pid in before if alive(pid)], "the harmed ranks are gone"
    assert pool.run(who) == [(0, 2), (1, 2)]
    pool.stop()
