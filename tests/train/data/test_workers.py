"""Processes that work for one: in order, and none is left, whatever ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from echelon.train.data.errors import DataError
from echelon.train.data.workers import in_order
from tests.pool import alive


def square(task: int, offset: int) -> bytes:
    """Large enough that a pipe cannot hold it."""
    if task < 0:
        raise DataError(f"{task} is negative")
    return b"%d" % (task * task + offset) * 100_000


def process(_: int) -> bytes:
    return b"%d" % os.getpid()


def answer_and_die(task: int) -> bytes:
    """An answer is larger than a pipe holds: while nobody reads the fourth, it is only begun when the alarm comes."""
    if task == 3:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    return b"x" * 10_000_000


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("tasks", [0, 1, 7])
def test_results_come_in_the_order_of_tasks(workers: int, tasks: int) -> None:
    results = list(in_order(square, range(tasks), workers, 5))
    assert results == [(task, square(task, 5)) for task in range(tasks)]


def test_the_work_is_shared() -> None:
    processes = {int(told) for _, told in in_order(process, range(6), 2)}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert not [number for number in processes if alive(number)]


def test_what_a_worker_raises_is_raised_here() -> None:
    with pytest.raises(DataError, match="-1 is negative"):
        list(in_order(square, [1, 2, -1, 3], 2, 0))


def test_a_worker_that_is_killed_in_the_middle_of_an_answer_is_noticed() -> None:
    results = in_order(answer_and_die, range(5), 2)
    for expected in range(2):
        assert next(results)[0] == expected
    while len(multiprocessing.active_children()) == 2:
        time.sleep(0.01)
    with pytest.raises(DataError, match="a process that tokenised has died"):
        list(results)


def test_who_stops_asking_leaves_no_process() -> None:
    results = in_order(process, range(100), 2)
    first = int(next(results)[1])
    assert alive(first)
    results.close()
    assert not alive(first)


def test_workers_end_with_the_first_process() -> None:
    """Also when that is killed, and cannot tell them."""
    script = (
        "import os\n"
        "from tests.train.data.test_workers import process\n"
        "from echelon.train.data.workers import in_order\n"
        "results = in_order(process, range(100), 2); print(int(next(results)[1]), int(next(results)[1]), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert told.returncode == -signal.SIGKILL, told.stderr
    workers = [int(number) for number in told.stdout.split()]
    assert len({*workers}) == 2
    deadline = time.monotonic() + 60
    with contextlib.suppress(StopIteration):
        while time.monotonic() < deadline:
            next(number for number in workers if alive(number))
            time.sleep(0.01)
    assert not [number for number in workers if alive(number)]
