"""Joules since a moment, where the machine tells them: GPUs by NVML, CPUs by RAPL.

Both are counters of hardware that this process shares with others: a GPU's is of all ranks on it, a CPU package's of
all that runs there. So one rank reads a GPU's counter, and one rank of a node the packages'.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"


class Energy(Protocol):
    """A counter that begins at 0."""

    name: str

    def joules(self) -> float: ...


class Package:
    """One CPU package. Its counter begins anew after some minutes of full power: it must be read more often."""

    def __init__(self, domain: Path) -> None:
        self._file = domain / "energy_uj"
        self._range = int((domain / "max_energy_range_uj").read_text())
        self._last, self._sum = int(self._file.read_text()), 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        self._sum += now - self._last if now >= self._last else now - self._last + self._range
        self._last = now
        return self._sum / 1e6


class Rapl:
    """All packages of this node; what lies inside a package (cores, memory) is counted in it."""

    name = "CPU (RAPL)"

    def __init__(self, packages: list[Package]) -> None:
        self._packages = packages

    def joules(self) -> float:
        return sum(package.joules() for package in self._packages)


class Nvml:
    """One GPU."""

    name = "GPU (NVML)"

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle
        self._first = self._millijoules()

    def joules(self) -> float:
        return (self._millijoules() - self._first) / 1e3

    def _millijoules(self) -> int:
        value = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value)):
            raise OSError("the GPU does not tell its energy")
        return value.value


def open_rapl(folder: Path = POWERCAP) -> Rapl | None:
    """None where there are no packages, or where only root may read them."""
    try:
        domains = [each for each in sorted(folder.glob("intel-rapl:*")) if each.name.count(":") == 1]
        named = [domain for domain in domains if (domain / "name").read_text().startswith("package")]
        packages = [Package(domain) for domain in named]
    except (OSError, ValueError):
        return None
    return Rapl(packages) if packages else None


def open_nvml(uuid: str, library: Any = None) -> Nvml | None:
    """The GPU that PyTorch names so; None where there is no NVML, or the GPU is too old (before Volta) to tell."""
    try:
        library = library or ctypes.CDLL(_NVML)
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2():
            return None
        if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
            return None
        return Nvml(library, handle)
    except (OSError, AttributeError):
        return None
