"""How long an operation takes, as one rank sees it: the timing that benchmarks and the tuner share.

Nothing here communicates but what it is given to call, so all ranks must ask for the same. Clocks are read once a
call; the garbage collector rests meanwhile.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

Call = Callable[[], Any]
_WIDTH = 64  # of the matrices that are multiplied to pass the time
_CALIBRATION_ROWS, _LARGEST_ROWS = 1024, 16384


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Seconds of each repetition of: start an operation, compute, wait for it."""

    overall: np.ndarray
    start: np.ndarray
    wait: np.ndarray


def call_times(call: Call, iterations: int, warmup: int, barrier: Call, *, separate: bool) -> np.ndarray:
    """Seconds that each of `iterations` calls took, after `warmup` calls that do not count.

    `separate` calls begin together: every one is followed by a barrier, which is not timed. Others follow each other.
    """
    with _undisturbed():
        barrier()
        for _ in range(warmup):
            call()
            if separate:
                barrier()
        return _separate_times(call, iterations, barrier) if separate else _running_times(call, iterations)


def overlapped_times(start: Call, computation: Call, iterations: int, warmup: int, barrier: Call) -> Overlapped:
    """Time `computation` while what `start` has begun (it returns what to wait for) is under way."""
    stamps = np.empty((iterations, 4))
    with _undisturbed():
        barrier()
        for iteration in range(-warmup, iterations):
            began = perf_counter()
            work = start()
            started = perf_counter()
            computation()
            computed = perf_counter()
            work.wait()
            if iteration >= 0:
                stamps[iteration] = began, started, computed, perf_counter()
            barrier()
    return Overlapped(stamps[:, 3] - stamps[:, 0], stamps[:, 1] - stamps[:, 0], stamps[:, 3] - stamps[:, 2])


class Computation:
    """A fixed amount of computing that takes about `seconds` where nothing disturbs it: matrix products, each a single
    kernel of PyTorch, as in training, during which Python's lock is free.
    """

    def __init__(self, seconds: float) -> None:
        self._take(_CALIBRATION_ROWS, 10)
        self()
        rows = _CALIBRATION_ROWS * seconds / min(self._time() / self._products for _ in range(5))
        products = math.ceil(rows / _LARGEST_ROWS)
        self._take(max(round(rows / products), 1), products)

    def __call__(self) -> None:
        for _ in range(self._products):
            torch.mm(self._rows, self._square, out=self._result)

    def _take(self, rows: int, products: int) -> None:
        self._products = products
        self._square = torch.zeros(_WIDTH, _WIDTH)
        self._rows, self._result = torch.zeros(rows, _WIDTH), torch.zeros(rows, _WIDTH)

    def _time(self) -> float:
        began = perf_counter()
        self()
        return perf_counter() - began


def _separate_times(call: Call, iterations: int, barrier: Call) -> np.ndarray:
    seconds = np.empty(iterations)
    for iteration in range(iterations):
        began = perf_counter()
        call()
        seconds[iteration] = perf_counter() - began
        barrier()
    return seconds


def _running_times(call: Call, iterations: int) -> np.ndarray:
    stamps = np.empty(iterations + 1)
    stamps[0] = perf_counter()
    for iteration in range(1, iterations + 1):
        call()
        stamps[iteration] = perf_counter()
    return np.diff(stamps)


@contextmanager
def _undisturbed() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
