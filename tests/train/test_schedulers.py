"""The examples for Slurm and for mpiexec with a host file, as they are."""

from __future__ import annotations

import re
import time

import pytest

from echelon.launch.find import find
from echelon.train.checkpoint import complete
from tests.launch.jobs import BIN, ROOT, run
from tests.train.runs import losses, rows, write

STEPS = 60


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.1)


def test_a_job_that_is_warned_requeues_itself_and_goes_on(slurm, tmp_path):
    config = write(tmp_path / "long.toml", train={"steps": STEPS})
    (tmp_path / "runs").mkdir()
    output = tmp_path / "output"
    environment = slurm | {"PATH": f"{BIN}:{slurm['PATH']}", "CONFIG": str(config)}
    submitted = run(
        "sbatch", "--parsable", "--chdir", tmp_path, "-o", output, ROOT / "examples" / "train.sbatch", **environment
    )
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    folder = tmp_path / "runs" / f"job-{job}"
    until(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) > 5)
    assert run("scancel", "--signal=USR1", job, **slurm).returncode == 0
    until(lambda: (folder / "metrics.jsonl").read_text().count('"end"') and rows(folder, "end")[-1]["why"] == "stopped")
    (stopped_at,) = complete(folder / "checkpoints")
    until(lambda: rows(folder, "end") and rows(folder, "end")[-1]["why"] == "done", 120)
    assert rows(folder, "start")[-1]["step"] == stopped_at
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    until(lambda: not run("squeue", "--noheader", **slurm).stdout.strip())
    assert re.search(r"report: .*report\.html", output.read_text())


def test_mpiexec_with_a_host_file(tmp_path):
    mpi = find()
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n" if mpi.family == "Open MPI" else "localhost:2\n")
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs" / "gpt-small.toml")
    path = f"{mpi.mpiexec.parent}:{BIN}:/usr/bin:/bin"
    script = ROOT / "examples" / "train-mpiexec.sh"
    job = run("sh", "-c", f"cd {tmp_path} && exec {script} hosts", PATH=path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert len(losses(tmp_path / "runs" / "gpt-small")) == 6


@pytest.mark.parametrize("name", ["train.sbatch", "train-mpiexec.sh"])
def test_shell_reads_it(name):
    assert run("bash", "-n", ROOT / "examples" / name).returncode == 0
