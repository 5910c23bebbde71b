"""Random numbers by name instead of by order: each is a hash of what it is for, such as a seed, an epoch and a sample.

Whoever asks, on whatever rank and in whatever order, gets the same. Numbers of 64 bits, on NumPy arrays that broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def words(*names: Any) -> Words:
    """Evenly distributed 64-bit numbers, one for each tuple of names (whole numbers, or arrays of them)."""
    hashed = np.zeros(1, np.uint64)
    for name in names:
        word = np.uint64(name % 2**64) if isinstance(name, int) else name.astype(np.uint64)
        hashed = _mix((hashed + _STEP) ^ word)
    return hashed


def below(limit: int, *names: Any) -> NDArray[np.int64]:
    """Whole numbers from 0 to limit - 1, alike probable."""
    return (words(*names) % np.uint64(limit)).astype(np.int64)


def fractions(*names: Any) -> NDArray[np.float64]:
    """Numbers from 0 up to, but not including, 1."""
    return (words(*names) >> np.uint64(11)).astype(np.float64) / 2.0**53


def _mix(x: Words) -> Words:
    """A bijection in which each bit of the input changes half the bits of the output (SplitMix64's); in place."""
    x ^= x >> np.uint64(30)
    x *= _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    x ^= x >> np.uint64(31)
    return x
