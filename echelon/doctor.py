"""What is installed, what is missing, and the command that mends it: `echelon doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass

from echelon.launch.find import INSTALL, Installation, NoMPI, candidates, find
from echelon.launch.start import Job, command_line, rank_environment

_LEVEL = """
import mpi4py; mpi4py.rc.thread_level = "multiple"
from mpi4py import MPI
levels = {getattr(MPI, "THREAD_" + name.upper()): name for name in ("single", "funneled", "serialized", "multiple")}
if MPI.COMM_WORLD.Get_rank() == 0:
    print(MPI.COMM_WORLD.Get_size(), levels[MPI.Query_thread()])
"""
_CUDA_AWARE = """
import ctypes, sys, mpi4py
from mpi4py import MPI
library, flag = ctypes.CDLL(sys.argv[1]), ctypes.c_int(0)
if hasattr(library, "MPIX_GPU_query_support"):
    library.MPIX_GPU_query_support(0, ctypes.byref(flag))  # MPICH and its family; 0 is MPIX_GPU_SUPPORT_CUDA
    print(flag.value)
elif hasattr(library, "MPIX_Query_cuda_support"):
    print(library.MPIX_Query_cuda_support())
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `mend` is the command that would put right what is wrong."""

    subject: str
    text: str
    good: bool = True
    mend: str = ""


def examine() -> list[Finding]:
    """Look at everything Echelon needs, without changing anything."""
    return [_python(), _torch(), _backend(), _mpi4py(), *_mpi(), _gpus(), _serving()]


def _python() -> Finding:
    return Finding("Python", f"{platform.python_version()} ({sys.executable})")


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("PyTorch", "not installed", False, "pip install torch")
    return Finding("PyTorch", version)


def _backend() -> Finding:
    code = "import torch.distributed as d; print(hasattr(d.Backend, 'ECHELON'), d.is_available())"
    answer = _run([sys.executable, "-c", code]).split()
    if answer == ["True", "True"]:
        return Finding("backend", "init_process_group('echelon') works in any script, without an import")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return Finding(
            "backend",
            "only after `import echelon`: TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set",
            False,
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )
    return Finding(
        "backend",
        "only after `import echelon`: the package is not installed in this environment",
        False,
        "pip install echelon",
    )


def _mpi4py() -> Finding:
    version = _version("mpi4py")
    if version is None:
        return Finding("mpi4py", "not installed", False, "pip install mpi4py")
    return Finding("mpi4py", version)


def _mpi() -> list[Finding]:
    findings = [
        Finding("passed over", f"{other.mpiexec}: {other.reason}")
        for other in candidates()
        if not isinstance(other, Installation)
    ]
    try:
        mpi = find()
    except NoMPI:
        return [*findings, Finding("MPI", "none was found", False, INSTALL)]
    findings += [
        Finding("MPI", f"{mpi.version} ({'from pip' if mpi.from_pip else 'of this system'}, {mpi.family} family)"),
        Finding("launcher", str(mpi.mpiexec)),
        Finding("library", str(mpi.library)),
    ]
    return [*findings, _two_ranks(mpi), _cuda_awareness(mpi)]


def _two_ranks(mpi: Installation) -> Finding:
    """Start two ranks: do they see each other, and at which thread level?"""
    job = Job(2, [sys.executable, "-c", _LEVEL])
    answer = _run(command_line(job, mpi), rank_environment(job, mpi)).split()
    if len(answer) != 2:
        return Finding(
            "two ranks",
            "could not be started",
            False,
            " ".join(command_line(Job(2, ["hostname"]), mpi)) + "   # and read what it says",
        )
    size, level = answer
    if size != "2":
        return Finding(
            "two ranks", f"two worlds of {size}: the launcher does not belong to the library", False, INSTALL
        )
    good = level == "multiple"
    return Finding(
        "two ranks",
        f"one world of 2, thread level {level}",
        good,
        "" if good else "use an MPI built with MPI_THREAD_MULTIPLE",
    )


def _cuda_awareness(mpi: Installation) -> Finding:
    answer = _run([sys.executable, "-c", _CUDA_AWARE, str(mpi.library)], mpi.environment())
    return Finding("CUDA-aware MPI", {"1": "yes", "0": "no"}.get(answer, "the library does not say"))


def _gpus() -> Finding:
    code = "import torch; print('\\n'.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))"
    names = _run([sys.executable, "-c", code]).splitlines()
    return Finding("GPUs", ", ".join(names) if names else "none that PyTorch sees")


def _serving() -> Finding:
    code = (
        "import torch; from echelon.serve.way import usual; "
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu'); print(device, usual(device), sep='\\n')"
    )
    device, _, choice = _run([sys.executable, "-c", code]).partition("\n")
    slow = device == "cuda" and "fused" not in choice
    return Finding("serving", choice or "cannot be told", not slow, "pip install triton" if slow else "")


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    return importlib.metadata.version(package)


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ) | (environment or {})
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
