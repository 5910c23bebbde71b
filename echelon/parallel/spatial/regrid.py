"""Where the pixels of an image go when its tiles are cut in another way, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from echelon.parallel.spatial.cut import bounds

Sizes = tuple[int, int]  # rows and columns: of an image, or of tiles


@dataclass(frozen=True)
class Box:
    """Rows and columns of a tile, counted in the tile."""

    rows: slice
    columns: slice

    @property
    def sizes(self) -> Sizes:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def tile_sizes(image: Sizes, tiles: Sizes, which: int) -> Sizes:
    """Of one tile; they are counted row by row."""
    rows, columns = _place(image, tiles, which)
    return len(rows), len(columns)


@cache
def moves(image: Sizes, tiles: Sizes, others: Sizes) -> dict[tuple[int, int], tuple[Box, Box]]:
    """What goes from which tile to which of the others, and where it lies in both."""
    found = {}
    for source in range(tiles[0] * tiles[1]):
        for target in range(others[0] * others[1]):
            here, there = _place(image, tiles, source), _place(image, others, target)
            common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(here, there, strict=True)]
            if all(common):
                found[source, target] = _box(common, here), _box(common, there)
    return found


def _place(image: Sizes, tiles: Sizes, which: int) -> tuple[range, range]:
    row, column = divmod(which, tiles[1])
    return bounds(image[0], tiles[0])[row], bounds(image[1], tiles[1])[column]


def _box(common: list[range], tile: tuple[range, range]) -> Box:
    rows, columns = (slice(each.start - of.start, each.stop - of.start) for each, of in zip(common, tile, strict=True))
    return Box(rows, columns)
