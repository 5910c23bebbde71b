"""Finding the MPI of this machine: a launcher (`mpiexec`) and the library (`libmpi`) that belongs to it.

A cluster's own MPI knows its network, so what stands on the PATH (a system's package, a loaded module) comes before
what pip put into this Python environment. A launcher and a library of different families would start N worlds of one
rank each, so each launcher is paired with a library of its own family, and the pair is asked for its version before
it is used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROBE = """
import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().strip(chr(0)).splitlines()[0])
"""
_LIBRARIES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40", "libmpich.so", "libmpich.so.12", "libmpi.dylib")
INSTALL = "pip install 'echelon[mpich]'"


class NoMPI(RuntimeError):
    """No usable MPI; the message says what was looked at and how to get one."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A launcher and the library that belongs to it."""

    mpiexec: Path
    family: str
    version: str
    library: Path
    from_pip: bool

    def environment(self) -> dict[str, str]:
        """What a rank needs so that mpi4py loads this library and no other."""
        return {"MPI4PY_LIBMPI": str(self.library)}


@dataclass(frozen=True, slots=True)
class Rejected:
    """A launcher that cannot be used, and why."""

    mpiexec: Path
    reason: str


def find(passed_over: Callable[[Rejected], object] = lambda _: None) -> Installation:
    """The MPI to use; `passed_over` is told of each one that cannot be. Raises `NoMPI` if there is none."""
    rejected = []
    for candidate in candidates():
        if isinstance(candidate, Installation):
            return candidate
        rejected.append(f"\n  {candidate.mpiexec}: {candidate.reason}")
        passed_over(candidate)
    looked = "".join(rejected) or "\n  no mpiexec on the PATH or in this Python environment"
    raise NoMPI(f"no usable MPI was found:{looked}\nto get one: {INSTALL}, or load your cluster's MPI module")


def candidates() -> Iterator[Installation | Rejected]:
    """Every launcher found, the preferred first, with its library or the reason why it has none."""
    for mpiexec, from_pip in _launchers():
        family = _family(_output([str(mpiexec), "--version"]))
        if family is None:
            yield Rejected(mpiexec, "not an MPICH, Intel MPI, MVAPICH or Open MPI launcher")
        else:
            yield _paired(mpiexec, family, from_pip)


def library_version(library: Path) -> str:
    """The version line of a library as mpi4py sees it, or '' if mpi4py cannot load it."""
    environment = dict(os.environ) | {"MPI4PY_LIBMPI": str(library)}
    return " ".join(_output([sys.executable, "-c", _PROBE], environment).split())


def _launchers() -> Iterator[tuple[Path, bool]]:
    own = Path(sysconfig.get_path("scripts")).resolve()
    path = [entry for entry in os.environ.get("PATH", "").split(os.pathsep) if entry and Path(entry).resolve() != own]
    seen = set()
    for name in ("mpiexec", "mpirun"):
        found = shutil.which(name, path=os.pathsep.join(path))
        if found and Path(found).resolve() not in seen:
            seen.add(Path(found).resolve())
            yield Path(found), False
    if (own / "mpiexec").exists():
        yield own / "mpiexec", True


def _paired(mpiexec: Path, family: str, from_pip: bool) -> Installation | Rejected:
    given = os.environ.get("MPI4PY_LIBMPI")
    choices = [Path(given)] if given else list(_libraries(mpiexec, from_pip))
    seen = []
    for library in choices:
        version = library_version(library)
        if _family(version) == family:
            return Installation(mpiexec, family, version, library, from_pip)
        seen.append(version)
    others = [version for version in seen if version]
    if others:
        return Rejected(
            mpiexec,
            f"it starts {family} programs, but the MPI library in use is {others[0]}: N ranks would be N worlds of one",
        )
    return Rejected(mpiexec, f"no {family} library (libmpi) was found that belongs to it")


def _libraries(mpiexec: Path, from_pip: bool) -> Iterator[Path]:
    """Where the library of a launcher may be: beside it, on the loader's path, in the system's folders."""
    prefixes = [sys.prefix] if from_pip else [str(mpiexec.parent.parent), str(mpiexec.resolve().parent.parent)]
    folders = [Path(prefix, lib) for prefix in prefixes for lib in ("lib", "lib64", "lib/release")]
    if not from_pip:
        folders += [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry]
        folders += [Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or ""), Path("/usr/lib64")]
    seen = set()
    for folder in folders:
        for name in _LIBRARIES:
            library = folder / name
            if library.exists() and library.resolve() not in seen:
                seen.add(library.resolve())
                yield library


def _family(version: str) -> str | None:
    """Which launchers and libraries understand each other, told from their version lines."""
    if re.search(r"open.?mpi|openrte|prterun|prte", version, re.IGNORECASE):
        return "Open MPI"
    if re.search(r"hydra|mpich|intel\(r\) mpi|mvapich", version, re.IGNORECASE):
        return "MPICH"
    return None


def _output(command: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
