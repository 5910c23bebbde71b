"""Who am I: the rank, size and place that the launcher wrote into this process's environment.

Every launcher has variables of its own. PyTorch scripts read torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, …), so those
are filled in from the launcher's, and never overridden. Nothing here starts MPI or imports torch: it runs inside
`import torch`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

# Slurm gives the batch script and the interactive step these reserved step ids; neither is a task of an `srun`.
_SLURM_FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank's place in its job. `launcher` is `mpi`, `torchrun`, or `none` for a process that was started alone."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def in_mpi_world(self) -> bool:
        return self.launcher == "mpi"


@dataclass(frozen=True, slots=True)
class _Family:
    """The variables one family of launchers sets; the first that is present wins."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()


# A library's own variables come before the resource manager's, which an `mpiexec` inside a Slurm job inherits.
_FAMILIES = (
    _Family(  # Open MPI: mpirun, mpiexec, prterun
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Family(  # MVAPICH 3 and later, then MVAPICH2: mpirun_rsh
        ("MVP_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
        ("MVP_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
        ("MVP_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
        ("MVP_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    _Family(  # PMI: MPICH's and Intel MPI's Hydra, Cray PALS, srun --mpi=pmi2
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)
_SLURM = _Family(("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",))


def identity(environ: Mapping[str, str] = os.environ) -> Identity:
    """Read this process's identity from `environ`."""
    if (
        "TORCHELASTIC_RUN_ID" in environ
    ):  # torchrun, perhaps itself inside an MPI or Slurm job whose variables it passes on
        return _read(
            _Family(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)), environ, "torchrun"
        ) or Identity("torchrun")
    families = (*_FAMILIES, _SLURM) if _is_slurm_task(environ) else _FAMILIES
    for family in families:
        if found := _read(family, environ, "mpi"):
            return found
    return Identity("none")


def take_cores() -> None:
    """Under `echelon run`, bind this rank to its share of the cores it may use.

    Done here rather than by the launcher, whose flags for it differ and which refuses to start where they do not fit.
    A share of one core is left unbound: a rank's own worker thread must have somewhere to run.
    """
    me = identity()
    if "ECHELON_JOB" not in os.environ or "ECHELON_CORES" in os.environ or not hasattr(os, "sched_setaffinity"):
        return
    if me.local_rank is None or me.local_size is None:
        return
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // me.local_size
    if share > 1:
        mine = cores[me.local_rank * share : (me.local_rank + 1) * share]
        os.sched_setaffinity(0, mine)
        os.environ["ECHELON_CORES"] = ",".join(map(str, mine))  # and what this rank starts inherits both


def show_output_by_line() -> None:
    """Under `echelon run` a rank's output goes through pipes: write whole lines, and at once."""
    if "ECHELON_JOB" in os.environ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def export(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give scripts torchrun's variables, from the launcher's, where they are not set already."""
    me = identity(environ)
    if not me.in_mpi_world or "RANK" in environ or "WORLD_SIZE" in environ:
        return
    environ["RANK"], environ["WORLD_SIZE"] = str(me.rank), str(me.size)
    if me.local_rank is not None:
        environ.setdefault("LOCAL_RANK", str(me.local_rank))
    if me.local_size is not None:
        environ.setdefault("LOCAL_WORLD_SIZE", str(me.local_size))


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _SLURM_FIRST_RESERVED_STEP


def _read(family: _Family, environ: Mapping[str, str], launcher: str) -> Identity | None:
    def first(names: tuple[str, ...]) -> int | None:
        return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)

    rank, size = first(family.rank), first(family.size)
    if rank is None or size is None:
        return None
    return Identity(launcher, rank, size, first(family.local_rank), first(family.local_size))
