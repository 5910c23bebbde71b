"""The geometry of checkpoints: a tensor's memory as boxes of the whole tensor, and who writes what.

A box is where it begins and how far it goes in each dimension. A range of a flattened tensor is a few boxes, each of
which is contiguous within the range: the rest of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Box(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def at(self, origin: tuple[int, ...]) -> Box:
        """The same box, in the coordinates of what holds its space at `origin`."""
        return Box(tuple(map(sum, zip(self.offsets, origin, strict=True))), self.sizes)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements from `start` to `stop` of a flattened tensor of this shape, in their order."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:
        return _in_row(last, inner, start - last * row, stop - last * row)
    found = _in_row(first - 1, inner, start - (first - 1) * row, row)
    if first < last:
        found.append(Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + _in_row(last, inner, 0, stop - last * row)


def _in_row(number: int, inner: tuple[int, ...], start: int, stop: int) -> list[Box]:
    return [Box((number, *box.offsets), (1, *box.sizes)) for box in boxes(inner, start, stop)]


class Dealer:
    """Deals tensors to those who hold the same: each to the one of them with the least so far.

    All ranks ask for the same tensors in the same order, so that all know who has which without a word.
    """

    def __init__(self) -> None:
        self._dealt: dict[int, list[int]] = {}  # bytes, by how many hold the same

    def deal(self, size: int, holders: int) -> int:
        """Which of the holders this tensor of `size` bytes goes to."""
        dealt = self._dealt.setdefault(holders, [0] * holders)
        chosen = min(range(holders), key=dealt.__getitem__)
        dealt[chosen] += size
        return chosen
