"""Who am I, told by each launcher's variables. `mpirun_rsh` cannot be had here: this is all that is tested of it."""

from __future__ import annotations

import os

import pytest

from echelon.launch.identity import Identity, export, identity, take_cores

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH3 = {name.replace("MV2", "MVP"): value for name, value in MVAPICH2.items()}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "5",
}
SRUN_PMI2 = SRUN | {"PMI_RANK": "3", "PMI_SIZE": "8"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "environ", [OPEN_MPI, HYDRA, MVAPICH2, MVAPICH3], ids=["openmpi", "hydra", "mvapich2", "mvapich3"]
)
def test_mpi_launchers(environ):
    assert identity(environ) == Identity("mpi", 3, 8, 1, 2)


@pytest.mark.parametrize("environ", [SRUN, SRUN_PMI2], ids=["srun", "srun --mpi=pmi2"])
def test_srun(environ):
    assert identity(environ) == Identity("mpi", 3, 8, 1, None)


@pytest.mark.parametrize("step", ["4294967291", "4294967290", ""], ids=["batch", "interactive", "none"])
def test_a_slurm_script_is_not_a_task(step):
    assert identity(SRUN | {"SLURM_STEP_ID": step}) == Identity("none")


@pytest.mark.parametrize("outer", [{}, OPEN_MPI, SRUN_PMI2], ids=["alone", "inside mpirun", "inside srun"])
def test_torchrun_is_the_innermost(outer):
    inner = outer | {"OMPI_COMM_WORLD_RANK": "0"} if outer is OPEN_MPI else outer
    assert identity(inner | TORCHRUN) == Identity("torchrun", 3, 8, 1, 2)


def test_mpiexec_inside_a_slurm_job():
    """An mpiexec started by a batch script passes Slurm's variables on, with the batch script's numbers."""
    assert identity(SRUN | {"SLURM_PROCID": "0"} | HYDRA) == Identity("mpi", 3, 8, 1, 2)


def test_export_fills_in():
    environ = dict(HYDRA)
    export(environ)
    wanted = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert {name: environ.get(name) for name in wanted} == wanted


def test_export_never_overrides():
    environ = HYDRA | {"RANK": "0", "WORLD_SIZE": "1"}
    export(environ)
    assert environ == HYDRA | {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
@pytest.mark.parametrize(("cores", "expected"), [(8, {4, 5, 6, 7}), (5, {2, 3}), (2, None)])
def test_a_rank_takes_its_share_of_the_cores(monkeypatch, cores, expected):
    bound = []
    for name in (*HYDRA, "ECHELON_CORES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (HYDRA | {"ECHELON_JOB": "x"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mine: bound.append(set(mine)))
    take_cores()
    take_cores()  # once is enough
    monkeypatch.delenv("ECHELON_CORES", raising=False)
    assert bound == ([expected] if expected else [])


def test_export_leaves_a_lone_process_alone():
    environ: dict[str, str] = {}
    export(environ)
    assert environ == {}
