"""The cache takes what weights, steps and graphs leave; a GPU of numbers stands in for one."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from echelon.serve import memory
from echelon.serve.engine import Engine
from echelon.serve.settings import Settings
from echelon.serve.way import Choice
from tests.serve.models import small

pytest.importorskip("triton", reason="needs Triton, whose kernels are what the memory is for")
GIB = 2**30
SETTINGS = Settings(token_budget=64, most_running=4)


class Built:
    pass


class Gpu:
    """Of 100 GiB, of which PyTorch's allocator has reserved some, and the driver taken others for itself."""

    def __init__(self) -> None:
        self.reserved, self.of_driver, self.peak = 20 * GIB, GIB, 0
        self.kept = 0  # of what graphs took, by the driver, when they are gone

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 100 * GIB - self.reserved - self.of_driver, 100 * GIB

    def memory_reserved(self, device: Any) -> int:
        return self.reserved

    def max_memory_reserved(self, device: Any) -> int:
        return self.peak

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(uuid="one")

    def build(self, *_: Any) -> Any:
        """A way that has 3 GiB of tensors, and of graphs 2 GiB with the driver."""
        self.reserved, self.of_driver = self.reserved + 3 * GIB, self.of_driver + 2 * GIB
        built = Built()
        weakref.finalize(built, self.give_back)
        return built

    def rehearse(self, *_: Any) -> None:
        self.peak = self.reserved + 5 * GIB

    def give_back(self) -> None:
        self.reserved, self.of_driver = self.reserved - 3 * GIB, self.of_driver - 2 * GIB + self.kept


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    for name in ("mem_get_info", "memory_reserved", "max_memory_reserved", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(memory, "choose", lambda *_: Choice(True, True, True))
    monkeypatch.setattr(memory, "build", gpu.build)
    monkeypatch.setattr(memory, "rehearse", gpu.rehearse)
    return gpu


@pytest.mark.parametrize("kept", [0, GIB, 2 * GIB])
def test_graphs_are_counted_that_the_driver_holds(gpu: Gpu, kept: int) -> None:
    """Whether it gives their memory back or not: nothing is counted twice."""
    gpu.kept = kept
    model = small()
    left = memory._left_on_gpu(model, SETTINGS, torch.device("cpu"), None)
    small_cache = memory.page_bytes(model, 16) * (64 // 16 + 4)
    assert left == (100 - 20 - 1 - 8 - 2) * GIB - memory._RESERVE_OF_GPU + small_cache


def test_a_cache_that_there_is_no_memory_for() -> None:
    with pytest.raises(
        ValueError, match=r"no memory for the cache beside the model: lower --cache-gib, or serve over more ranks"
    ):
        Engine(small(context=2**40), settings=Settings(cache_gib=2**30))


@pytest.mark.parametrize("said", ["CUDA error: out of memory", "CUDA out of memory. Tried to allocate 2 GiB"])
def test_what_the_driver_says(said: str) -> None:
    with pytest.raises(ValueError, match="there is no memory for this"), memory.enough_for("this"):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="another"), memory.enough_for("this"):
        raise RuntimeError("another error")
