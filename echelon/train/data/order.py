"""The global order of samples: an endless stream of epochs, each a shuffle of all samples.

A shuffle is not a list but a bijection that is computed where it is needed, from seed and epoch: a Feistel network. A
number is a row and a column of a table that is just large enough; in turns the row moves by a hash of the column and
the column by a hash of the row, which can be undone, so no two numbers meet. What falls into the few cells beyond the
last sample walks on until it falls on a sample. So any place of any epoch is found at once, and nothing is kept.

    order = Order(length=10**12, seed=0)
    order[10**9 : 10**9 + 32]  # the numbers of the samples that stand at these places
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from echelon.train.data import chance

Numbers = NDArray[np.int64]
_ROUNDS = 8


class Order:
    """Which sample stands at which place."""

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"an order of {length} samples: there is at least one")
        self.length, self.seed = length, seed
        self._rows = math.isqrt(length - 1) + 1
        self._columns = -(-length // self._rows)

    def __getitem__(self, places: slice | Numbers) -> Numbers:
        """The samples at some places: a slice with both ends, or an array."""
        if isinstance(places, slice):
            places = np.arange(places.start, places.stop, places.step or 1)
        epochs, numbers = self.epochs(places), places % self.length
        numbers = self._shuffle(numbers, epochs)
        while (beyond := numbers >= self.length).any():
            numbers[beyond] = self._shuffle(numbers[beyond], epochs[beyond])
        return numbers

    def epochs(self, places: Numbers) -> Numbers:
        """How often all samples have been seen before."""
        return places // self.length

    def _shuffle(self, numbers: Numbers, epochs: Numbers) -> Numbers:
        row, column = np.divmod(numbers, self._columns)
        for turn in range(0, _ROUNDS, 2):
            row = (row + chance.below(self._rows, self.seed, turn, epochs, column)) % self._rows
            column = (column + chance.below(self._columns, self.seed, turn + 1, epochs, row)) % self._columns
        return np.asarray(row * self._columns + column, np.int64)
