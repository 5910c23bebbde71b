"""Jobs that are killed at random moments, and taken up again: no checkpoint is ever lost."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from echelon.train.checkpoint import complete
from tests.launch.jobs import echelon
from tests.train.runs import losses, write
from tests.train.test_command import begin, processes, steps_taken, wait_until

JOBS = 20
LONG = {"steps": 80, "batch": 8, "log_every": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    job = echelon("train", write(folder / "long.toml", train=LONG, checkpoint={"every": 2}), "-n", 2, "--run", folder)
    assert job.returncode == 0, job.stdout + job.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(JOBS))
def test_killed_at_a_random_moment(tmp_path, undisturbed, number):
    """A rank, all ranks, or what started them; saving every other step, most kills fall into a save."""
    chance = random.Random(number)
    folder = tmp_path / "run"
    job = begin(write(tmp_path / "long.toml", train=LONG, checkpoint={"every": 2}), "-n", 2, "--run", folder)
    moment = chance.randint(1, 60)
    wait_until(lambda: steps_taken(folder) >= moment, job)
    time.sleep(chance.random() / 20)
    ranks = processes(folder)
    assert len(ranks) == 2
    before = complete(folder / "checkpoints")
    for process in chance.choice([ranks[:1], ranks[1:], ranks, [job.pid]]):
        os.kill(process, signal.SIGKILL)
    job.communicate(timeout=60)
    wait_for_the_end(folder)
    after = complete(folder / "checkpoints")
    assert after[-1:] >= before[-1:]
    again = echelon("train", folder, "-n", 2)
    assert again.returncode == 0, again.stdout + again.stderr
    assert losses(folder) == losses(undisturbed)


def wait_for_the_end(folder) -> None:
    deadline = time.monotonic() + 30
    while processes(folder):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.05)
