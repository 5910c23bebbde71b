"""Where everything is, by arithmetic alone: how an axis is cut into tiles, and what a window needs to see of it.

An axis of any length is always cut in the same way, so nobody needs to be told where a tile lies: of `length` rows over
`tiles`, tile i has those from i·length // tiles to (i + 1)·length // tiles. A short axis leaves some tiles empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise


@cache
def bounds(length: int, tiles: int) -> tuple[range, ...]:
    """The rows of each tile."""
    ends = [tile * length // tiles for tile in range(tiles + 1)]
    return tuple(range(low, high) for low, high in pairwise(ends))


@dataclass(frozen=True)
class Window:
    """What slides along one axis: of a convolution, or a pooling."""

    kernel: int
    stride: int
    before: int  # rows of padding
    after: int
    dilation: int = 1
    ceil: bool = False

    def outputs(self, length: int) -> int:
        room = length + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        count = (room + (self.stride - 1 if self.ceil else 0)) // self.stride + 1
        if self.ceil and (count - 1) * self.stride >= length + self.before:
            count -= 1  # the last must begin within
        if count < 1:
            raise ValueError(
                f"a window of {self.kernel} rows, {self.dilation} apart, does not fit into {length} rows with "
                f"{self.before} and {self.after} of padding"
            )
        return count

    def sees(self, outputs: range) -> range:
        """The rows behind some outputs, counted as if there were no borders."""
        if not outputs:
            return range(0)
        first = outputs.start * self.stride - self.before
        last = (outputs.stop - 1) * self.stride - self.before + self.dilation * (self.kernel - 1)
        return range(first, last + 1)


def within(rows: range, length: int) -> range:
    """Those that exist."""
    low = min(max(rows.start, 0), length)
    return range(low, max(min(rows.stop, length), low))


def beyond(rows: range, length: int) -> tuple[int, int]:
    """How many of them lie before the first row that exists, and after the last."""
    if not rows:
        return 0, 0
    inside = within(rows, length)
    before = min(max(-rows.start, 0), len(rows))
    return before, len(rows) - before - len(inside)


@dataclass(frozen=True)
class Parcel:
    """Rows that one tile sends to another: from which of its rows on, how many, and where they go: into which of the
    ranges that the other wants, and from which row of that on.
    """

    start: int
    count: int
    piece: int
    place: int


@cache
def parcels(length: int, wanted: tuple[tuple[range, ...], ...]) -> dict[tuple[int, int], list[Parcel]]:
    """What goes from which tile to which (also to itself), so that each gets the ranges of rows that it wants."""
    held = bounds(length, len(wanted))
    found: dict[tuple[int, int], list[Parcel]] = {}
    for target, pieces in enumerate(wanted):
        for number, piece in enumerate(pieces):
            if piece and not 0 <= piece.start < piece.stop <= length:
                raise ValueError(f"rows {piece.start} to {piece.stop} of {length} were asked for")
            for source, has in enumerate(held):
                low, high = max(piece.start, has.start), min(piece.stop, has.stop)
                if low < high:
                    parcel = Parcel(low - has.start, high - low, number, low - piece.start)
                    found.setdefault((source, target), []).append(parcel)
    return found


def rows(pieces: Sequence[range]) -> int:
    return sum(len(piece) for piece in pieces)
