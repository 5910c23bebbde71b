"""`srun` on a real Slurm of one node."""

from __future__ import annotations

import sys

import pytest

from tests.launch.jobs import SCRIPTS, result, run
from tests.launch.test_launchers import expected


@pytest.mark.parametrize("backend", ["echelon", "mpi"])
def test_srun(slurm, backend):
    job = run("srun", "--mpi=pmi2", "-n", 2, sys.executable, SCRIPTS / "ddp.py", backend, **slurm)
    assert result(job) == expected(2)


def test_a_failing_rank_ends_the_job(slurm):
    """srun lets the other tasks go on by default: the rank itself must end them."""
    job = run("srun", "--mpi=pmi2", "-n", 2, sys.executable, SCRIPTS / "ends.py", "exits", timeout=60, **slurm)
    assert job.returncode != 0


def test_srun_without_mpi_says_so(slurm):
    """Without a PMI each task would be a world of one: an error that names the remedy, not two lonely ranks."""
    job = run("srun", "--mpi=none", "-n", 2, sys.executable, SCRIPTS / "ddp.py", "echelon", **slurm)
    assert job.returncode != 0
    assert "the launcher started 2 processes, but MPI sees a world of 1" in job.stderr
    assert "srun --mpi=pmi2" in job.stderr


def test_echelon_run_inside_a_batch_script(slurm, tmp_path):
    """The script is no task itself, but what it starts is a job of two."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -m echelon.cli run -n 2 {SCRIPTS / 'ddp.py'} echelon\n")
    output = tmp_path / "output"
    assert run("sbatch", "--wait", "-n", 2, "-o", output, script, **slurm).returncode == 0, output.read_text()
    assert '"size": 2' in output.read_text()
