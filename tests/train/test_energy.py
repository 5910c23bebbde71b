"""Counters of energy, over a tree as Linux has it and over a library that does what NVML does."""

from __future__ import annotations

import ctypes

import pytest

from echelon.train.energy import open_nvml, open_rapl


def domain(folder, name, kind, energy, of=10**9):
    made = folder / name
    made.mkdir(parents=True)
    (made / "name").write_text(f"{kind}\n")
    (made / "energy_uj").write_text(f"{energy}\n")
    (made / "max_energy_range_uj").write_text(f"{of}\n")
    return made


def test_packages_are_summed_and_their_parts_are_not(tmp_path):
    zero, one = domain(tmp_path, "intel-rapl:0", "package-0", 500), domain(tmp_path, "intel-rapl:1", "package-1", 0)
    core = domain(tmp_path, "intel-rapl:0:0", "core", 0)
    system = domain(tmp_path, "intel-rapl:2", "psys", 0)
    rapl = open_rapl(tmp_path)
    assert rapl.joules() == 0
    for made, energy in ((zero, 2_000_500), (one, 3_000_000), (core, 10**8), (system, 10**8)):
        (made / "energy_uj").write_text(str(energy))
    assert rapl.joules() == pytest.approx(5)


def test_a_counter_that_begins_anew(tmp_path):
    package = domain(tmp_path, "intel-rapl:0", "package-0", 990_000_000)
    rapl = open_rapl(tmp_path)
    for energy, joules in ((995_000_000, 5), (2_000_000, 12), (1_000_000, 1011)):
        (package / "energy_uj").write_text(str(energy))
        assert rapl.joules() == pytest.approx(joules)


def test_a_machine_that_does_not_tell(tmp_path):
    assert open_rapl(tmp_path / "none") is None
    made = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    (made / "energy_uj").unlink()  # root may read what a test cannot forbid it
    assert open_rapl(tmp_path) is None


class Library:
    """What is called of NVML, with its codes: 0 is success, 3 is not supported, 6 is not found."""

    def __init__(self, supported: bool = True) -> None:
        self.supported, self.millijoules = supported, 7_000

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:
        if uuid != b"GPU-ab-12":
            return 6
        handle._obj.value = 41
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value) -> int:
        assert (isinstance(handle, ctypes.c_void_p), handle.value) == (True, 41)
        value._obj.value = self.millijoules
        return 0 if self.supported else 3


def test_a_gpu():
    library = Library()
    nvml = open_nvml("ab-12", library)
    assert nvml.joules() == 0
    library.millijoules += 2_500
    assert nvml.joules() == 2.5


def test_a_gpu_that_does_not_tell():
    assert open_nvml("other", Library()) is None
    assert open_nvml("ab-12", Library(supported=False)) is None
    assert open_nvml("ab-12", object()) is None  # a library too old to have the function
