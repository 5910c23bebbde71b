"""Who reads which keys of the answers of a step, as plain data.

A program of attention reads the keys of one sequence and one head. There may be fewer programs than the GPU has
processors; and where one sequence is much longer than the others, all would wait for it. So the keys of an answer that
has more of them than its share are read in pieces of about that size, and the largest piece begins first. What comes of
pieces must be put together again, so there are no more than help: as measured on an H200, two programs a processor for
a few answers, and up to eight for many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128  # keys, of which a piece has a whole number: so many a program of attention takes at once


@dataclass(frozen=True)
class Pieces:
    """For a model with so many heads of keys, on a GPU with so many processors, and sequences of at most `longest`."""

    heads: int
    processors: int
    longest: int

    def most(self, answers: int) -> tuple[int, int]:
        """Tiles and joins of so many answers, whatever their lengths."""
        more = self._more(answers)
        return min(answers + more, answers * -(-self.longest // _BLOCK)), min(answers, more)

    def of(self, keys_A: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tiles and joins of answers that have so many keys; see `kernels.attend`."""
        if not len(keys_A):
            return np.zeros((0, 5), np.int32), np.zeros((0, 3), np.int32)
        share = -(-int(keys_A.sum()) // self._more(len(keys_A)))
        wanted_A = ((keys_A + share // 2) // share).clip(1)
        size_A = -(-keys_A // (wanted_A * _BLOCK)) * _BLOCK
        pieces_A = -(-keys_A // size_A)
        first_A = pieces_A.cumsum() - pieces_A
        of_X = np.arange(len(keys_A)).repeat(pieces_A)
        first_X = first_A[of_X]
        piece_X = np.arange(len(of_X)) - first_X
        tiles_5X = np.array([of_X, np.ones_like(of_X), piece_X, pieces_A[of_X], first_X], np.int32)
        largest_first_X = np.argsort(-(keys_A // pieces_A)[of_X], kind="stable")
        joins_3A = np.array([np.arange(len(keys_A)), pieces_A, first_A], np.int32)
        return tiles_5X[:, largest_first_X].T, joins_3A[:, pieces_A > 1].T

    def _more(self, answers: int) -> int:
        """By how many there may be more tiles than answers."""
        programs = min(max(2 * answers * self.heads, 2 * self.processors), 8 * self.processors)
        return -(-programs // self.heads)
