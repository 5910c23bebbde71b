"""An array that is nobody's: it has the array interface and nothing else."""

from __future__ import annotations

import numpy as np


class Bare:
    def __init__(self, count: int, dtype: np.dtype) -> None:
        self._array = np.zeros(count, dtype)
        self.__array_interface__ = self._array.__array_interface__


def bare(count: int, dtype: np.dtype) -> Bare:
    return Bare(count, dtype)


def no_array(count: int, dtype: np.dtype) -> list[int]:
    return [0] * count
