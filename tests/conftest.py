"""Shared by all tests: the pools of ranks, and what must be skipped, with its reason, where the machine lacks it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.pool import Pool
from tests.slurm import slurm  # noqa: F401 (a fixture)

settings.register_profile("echelon", deadline=None)  # timing is never asserted
settings.load_profile("echelon")
SIZES = range(2, 9)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: then kernels are computed on the CPU


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """One pool a size; each starts its ranks when a test first needs them."""
    made = {size: Pool(size) for size in SIZES}
    yield made
    for pool in made.values():
        pool.stop()


@pytest.fixture(scope="session")
def ranks(pools: dict[int, Pool]) -> Callable[..., list[Any]]:
    """`ranks(n, function, *arguments)`: call a function on each of n ranks, and return what they returned."""

    def run(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        return pools[size].run(function, *arguments, timeout=timeout)

    return run
