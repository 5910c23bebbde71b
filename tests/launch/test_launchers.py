"""An unmodified DDP script under every launcher, and the end of a job that goes wrong."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon.launch import start
from echelon.launch.find import Installation, find
from echelon.launch.logbook import Logbook
from echelon.launch.start import Job, command_line
from tests.launch.jobs import ROOT, SCRIPTS, echelon, environment, result, run
from tests.pool import alive


def expected(size: int, transport: str = "mpi") -> dict[str, object]:
    """What the script must print, computed in one process."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        sum(model(torch.full((2, 4), float(rank))).sum() / size for rank in range(size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [round(w, 5) for w in model.weight.flatten().tolist()]
    return {"size": size, "places": [[r, r] for r in range(size)], "weights": weights, "transport": transport}


def mpiexec(size: int, *command: object) -> list[str]:
    return command_line(Job(size, [str(part) for part in command]), find())


@pytest.mark.parametrize(("size", "backend"), [(1, "echelon"), (2, "mpi"), (3, "echelon")])
def test_echelon_run(size, backend):
    assert result(echelon("run", "-n", size, SCRIPTS / "ddp.py", backend)) == expected(size)


@pytest.mark.parametrize("backend", ["echelon", "gloo"])
def test_mpiexec(backend):
    """No MASTER_ADDR for anyone, not even for Gloo."""
    transport = "mpi" if backend == "echelon" else "none"
    assert result(run(*mpiexec(2, sys.executable, SCRIPTS / "ddp.py", backend))) == expected(2, transport)


def torchrun(size: int, *command: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *command]


def test_torchrun():
    job = run(*torchrun(2, SCRIPTS / "ddp.py", "echelon"))
    assert result(job) == expected(2, "gloo")
    assert job.stderr.count("communicating over Gloo") == 1


def test_torchrun_inside_mpiexec():
    """A launcher inside another: the inner one counts."""
    assert result(run(*mpiexec(1, *torchrun(2, SCRIPTS / "ddp.py", "echelon")))) == expected(2, "gloo")


def test_every_operation_under_torchrun():
    transport, count = result(run(*torchrun(3, SCRIPTS / "every_operation.py"), timeout=240)).split()
    assert transport == "gloo"
    assert int(count) > 250


def test_works_and_messages_under_torchrun():
    assert result(run(*torchrun(2, SCRIPTS / "over_gloo.py"), timeout=120)) == "gloo 10"


def test_own_numbers_are_kept():
    """RANK and WORLD_SIZE that are already set win; where they contradict MPI, the error says so."""
    job = run(
        *mpiexec(2, sys.executable, SCRIPTS / "ddp.py", "echelon"),
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    assert job.returncode != 0
    assert "must be MPI's own" in job.stderr


def test_prefix():
    job = echelon("run", "-n", 2, "--prefix", SCRIPTS / "ends.py", "ends well")
    assert job.returncode == 0
    assert sorted(line.split()[:2] for line in job.stdout.splitlines()) == [["[0]", "PROCESS"], ["[1]", "PROCESS"]]


@pytest.mark.parametrize(("how", "codes"), [("raises", {1}), ("exits", {7}), ("vanishes", {8}), ("killed", {9, 137})])
def test_exit_code_is_the_failing_ranks(how, codes):
    job = echelon("run", "-n", 2, SCRIPTS / "ends.py", how, timeout=60)
    assert job.returncode in codes
    assert not _alive(job.stdout)
    if how == "raises":
        assert "ValueError: on purpose" in job.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_stopped_job_leaves_nothing(number):
    command = [sys.executable, "-m", "echelon.cli", "run", "-n", "2", str(SCRIPTS / "ends.py"), "sleeps"]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(), cwd=ROOT
    )
    lines = []
    while not lines or lines[-1].strip() != "SLEEPING":
        lines.append(job.stdout.readline())
        assert lines[-1], "the job ended by itself"
    job.send_signal(number)
    assert job.wait(20) != 0
    deadline = time.monotonic() + 15
    while (left := _alive("".join(lines))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_missing_script():
    job = echelon("run", "-n", 2, "no_such_script.py")
    assert job.returncode != 0
    assert "no_such_script.py" in job.stderr


def test_help_names_the_commands():
    text = echelon("--help").stdout
    assert "run" in text
    assert "doctor" in text


def test_doctor():
    job = echelon("doctor")
    assert job.returncode == 0, job.stdout
    for words in ("one world of 2, thread level multiple", "CUDA-aware MPI", "PyTorch", "GPUs", "all is well"):
        assert words in " ".join(job.stdout.split())


def _alive(output: str) -> list[int]:
    """The ranks that told their process number and still run."""
    pids = [int(line.split("PROCESS ")[1]) for line in output.splitlines() if "PROCESS " in line]
    assert pids, output
    return [pid for pid in pids if alive(pid)]


if os.environ.get("ECHELON_JOB"):
    raise RuntimeError("these tests start jobs of their own: do not run them inside one")


def test_a_failed_job_ends_although_its_launcher_does_not(tmp_path, capfd):
    """A rank hands in a failure; the launcher of MPI, here one that knows no end, is not waited for."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text('#!/bin/sh\nshift 2\n"$@" &\nwhile true; do sleep 1; done\n')
    launcher.chmod(0o755)
    words = "import os, time; from echelon.launch.watch import Line; line = Line(os.environ['ECHELON_WATCH'], 0)"
    rank = f"{words}; line.tell({Logbook(0).snapshot()}); line.fail('on purpose'); time.sleep(100)"
    mpi = Installation(launcher, "MPICH", "0", tmp_path / "libmpi.so", from_pip=False)
    started = time.monotonic()
    assert start.run(start.Job(1, [sys.executable, "-c", rank]), mpi) == 1
    assert time.monotonic() - started < 15
    assert capfd.readouterr().err == "echelon: on purpose\n"


def test_leftovers_of_killed_launchers_are_removed():
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, mine = (start.memory_folder() / f"echelon-{number}-test" for number in (dead.pid, os.getpid()))
    for folder in (left, mine):
        folder.mkdir()
        (folder / "0").touch()
    try:
        start._remove_leftovers()
        assert (left.exists(), mine.exists()) == (False, True)
    finally:
        shutil.rmtree(mine)


def test_shared_memory_of_killed_ranks_is_removed(tmp_path):
    """What is open stays, whoever has started those ranks; whatever else this process has open."""
    job = echelon("run", "-n", 2, SCRIPTS / "ends.py", "killed", timeout=60)
    left = {Path(line.split("MEMORY ")[1]) for line in job.stdout.splitlines() if "MEMORY " in line}
    if find().family == "MPICH":
        assert left, "MPICH's shared memory has another name than it had"
    used = start.memory_folder() / f"mpich_shm_test_{os.getpid()}"
    no_text = os.fsencode(tmp_path) + b"/caf\xe9"
    try:
        for path in (used, no_text):
            with open(path, "wb") as file:
                file.write(bytes(4096))
        with open(no_text, "r+b") as odd, used.open("r+b") as file, mapped(odd), mapped(file):
            for path in (used, *left):
                with contextlib.suppress(FileNotFoundError):  # another job may have removed what is left
                    os.utime(path, (0, 0))  # not new any more
            start._remove_leftovers()
            assert used.exists()
        assert not [path for path in left if path.exists()]
        used.touch()
        start._remove_leftovers()
        assert used.exists(), "it may be opened yet"
    finally:
        used.unlink()


def mapped(file):
    return mmap.mmap(file.fileno(), 4096)
