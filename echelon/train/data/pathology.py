"""Images that look like stained tissue under a microscope, of any size, with what a pathologist would mark in them.

Everything is a function of the place: a tile is painted without those beside it, and no more than a row is held. Where
tissue lies, how it is coloured and where a tumour grows follows smooth noise. Nuclei are ellipses, at most one in each
cell of a grid, that reach no further than the cells around. Colours are those of two dyes that swallow light.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from echelon.train.data import chance
from echelon.train.data.errors import DataError
from echelon.train.data.tiff import tifffile

Kind = Literal["classes", "masks"]
Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
Places = NDArray[np.int64]
TILE = 256
TISSUE, NUCLEUS, TUMOUR_NUCLEUS = 0, 1, 2  # in a mask
_CELL = 20  # pixels a side
_PURPLE = np.array([0.65, 0.70, 0.29], np.float32)  # what haematoxylin swallows of red, green and blue
_PINK = np.array([0.07, 0.99, 0.11], np.float32)  # and what eosin does
_NOWHERE = 1e6


@dataclass(frozen=True)
class Slide:
    """One image of a set."""

    seed: int
    number: int
    size: int
    tumour: bool

    def pixels(self, rows: range, columns: range) -> Pixels:
        """Rows, columns, colours."""
        distance, dark, _ = self._nuclei(rows, columns)
        nucleus = np.clip((1.15 - distance) * 4, 0, 1)
        y, x = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        fibres = self._noise("fibres", y, x, (6, 40)) + self._noise("more fibres", y, x, (36, 8))
        cloud, spots = self._noise("cloud", y, x, (90, 90)), self._noise("spots", y, x, (3, 3))
        tissue, grown = np.clip(self._tissue(y, x) * 14, 0, 1), np.clip(self._growth(y, x) * 4 + 0.5, 0, 1)
        pink = tissue * (0.12 + 0.16 * fibres + 0.2 * cloud + 0.1 * spots) * (1 - 0.3 * grown) * (1 - 0.4 * nucleus)
        purple = tissue * (0.02 + 0.06 * cloud + 0.12 * grown) + nucleus * dark * (0.65 + 0.6 * spots)
        strength = 0.85 + 0.3 * self._chances("dyes", np.arange(2))
        swallowed = purple[..., None] * (strength[0] * _PURPLE) + pink[..., None] * (strength[1] * _PINK)
        grain = 0.03 * self._chances("grain", y[:, None], x)
        return np.asarray(np.rint(248 * np.exp(-swallowed - grain[..., None])), np.uint8)

    def mask(self, rows: range, columns: range) -> Pixels:
        distance, _, tumour = self._nuclei(rows, columns)
        return np.where(distance < 1, np.where(tumour, TUMOUR_NUCLEUS, NUCLEUS), TISSUE).astype(np.uint8)

    def _nuclei(self, rows: range, columns: range) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Of each pixel: how far it is from the middle of the next nucleus, whose edge is at 1, how dark that is, and
        whether it is one of a tumour.
        """
        down, across = (np.arange(each.start // _CELL - 1, (each.stop - 1) // _CELL + 2) for each in (rows, columns))
        middles = down * _CELL + _CELL // 2, across * _CELL + _CELL // 2
        tumour = self._growth(*middles) > 0
        chances = self._chances("nuclei", down[:, None, None], across[:, None], np.arange(7))
        often, turn, length, roundness, shade = np.moveaxis(chances[..., :5], -1, 0)
        exists = (often < np.where(tumour, 0.85, 0.3)) & (self._tissue(*middles) > 0.05)
        longer = np.where(tumour, 6.5 + 4.5 * length, 4.5 + 2.0 * length)
        shorter = longer * np.where(tumour, 0.65 + 0.3 * roundness, 0.45 + 0.4 * roundness)
        dark = np.where(tumour, 1.1 + 0.7 * shade, 0.7 + 0.4 * shade)
        cos, sin = np.cos(np.pi * turn), np.sin(np.pi * turn)
        shape = len(down) - 2, _CELL, len(across) - 2, _CELL
        nearest, which = np.full(shape, _NOWHERE, np.float32), np.zeros(shape, np.int64)
        within = np.arange(_CELL, dtype=np.float32)
        cells = np.arange(tumour.size).reshape(tumour.shape)
        for step_y, step_x in itertools.product((-1, 0, 1), repeat=2):
            cell = np.s_[1 + step_y : 1 + step_y + shape[0], None, 1 + step_x : 1 + step_x + shape[2], None]
            off_y = within[:, None, None] - _CELL * (step_y + chances[..., 5][cell])
            off_x = within - _CELL * (step_x + chances[..., 6][cell])
            along = off_x * (cos / longer)[cell] + off_y * (sin / longer)[cell]
            beside = off_y * (cos / shorter)[cell] - off_x * (sin / shorter)[cell]
            distance = along**2 + beside**2 + np.where(exists, 0, np.float32(_NOWHERE))[cell]
            closer = distance < nearest
            np.copyto(nearest, distance, where=closer)
            np.copyto(which, cells[cell], where=closer)
        box = _slice(rows, down), _slice(columns, across)
        nuclei = which.reshape(shape[0] * _CELL, -1)[box]
        return np.sqrt(nearest.reshape(shape[0] * _CELL, -1)[box]), dark.ravel()[nuclei], tumour.ravel()[nuclei]

    def _tissue(self, y: Places, x: Places) -> Floats:
        """Above 0 where there is some."""
        rough = 0.7 * self._noise("tissue", y, x, (150, 150)) + 0.3 * self._noise("border", y, x, (30, 30))
        return np.asarray(rough - 0.24, np.float32)

    def _growth(self, y: Places, x: Places) -> Floats:
        """Above 0 where there is a tumour: around some place near the middle."""
        if not self.tumour:
            return np.full((len(y), len(x)), -1, np.float32)
        middle = self.size * (0.4 + 0.2 * self._chances("growth", np.arange(2)))
        away = np.hypot((y - middle[0])[:, None], x - middle[1]) / (0.5 * self.size)
        rough = 0.8 * self._noise("growth", y, x, (180, 180)) + 0.4 * self._noise("edge", y, x, (50, 50))
        return np.asarray(0.2 + rough - away, np.float32)

    def _noise(self, name: str, y: Places, x: Places, scale: tuple[int, int]) -> Floats:
        """From 0 to 1, smooth over so many rows and columns."""
        (i, down), (j, across) = (_between(each, step) for each, step in zip((y, x), scale, strict=True))
        known = self._chances(name, np.arange(i[0], i[-1] + 2)[:, None], np.arange(j[0], j[-1] + 2))
        left, right = known[:, j - j[0]], known[:, j - j[0] + 1]
        rows = left + across * (right - left)
        upper, lower = rows[i - i[0]], rows[i - i[0] + 1]
        return np.asarray(upper + down[:, None] * (lower - upper), np.float32)

    def _chances(self, name: str, *places: Places) -> Floats:
        return chance.fractions(self.seed, self.number, zlib.crc32(name.encode()), *places).astype(np.float32)


def write_set(
    folder: Path,
    *,
    count: int,
    size: int,
    kind: Kind = "classes",
    seed: int = 0,
    done: Callable[[int], object] = lambda more: None,
) -> None:
    """Write images into a folder that is new or empty: in folders of two classes by turns, or with masks; `done` is
    told how many more bytes of pixels have been painted. If something goes wrong, nothing stays.
    """
    tifffile()
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise DataError(f"{folder} has something in it: name a folder that is new or empty")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from None
    partial = folder / f".{os.getpid()}.partial"
    try:
        for number in range(count):
            _write(partial, Slide(seed, number, size, kind == "masks" or number % 2 == 1), kind, done)
        for each in partial.iterdir():
            each.rename(folder / each.name)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if created:
            with contextlib.suppress(OSError):  # it is not empty, then
                folder.rmdir()


def painted_bytes(count: int, size: int, kind: Kind) -> int:
    """What `done` will have been told in all."""
    return count * size**2 * (4 if kind == "masks" else 3)


def _between(places: Places, step: int) -> tuple[Places, Floats]:
    """The knots before some places, and how far each is on the way to the next, without a bend at either."""
    way = (places % step / step).astype(np.float32)
    return places // step, way * way * (3 - 2 * way)


def _slice(places: range, cells: Places) -> slice:
    """Of the pixels of cells, without those at both ends."""
    first = int(cells[1]) * _CELL
    return slice(places.start - first, places.stop - first)


def _write(folder: Path, slide: Slide, kind: Kind, done: Callable[[int], object]) -> None:
    name, square = f"{slide.number:05}.tif", (slide.size, slide.size)
    if kind == "masks":
        _write_tiles(folder / "images" / name, (*square, 3), slide.pixels, done)
        _write_tiles(folder / "masks" / name, square, slide.mask, done)
    else:
        _write_tiles(folder / ("tumour" if slide.tumour else "benign") / name, (*square, 3), slide.pixels, done)


def _write_tiles(
    path: Path, shape: tuple[int, ...], paint: Callable[[range, range], Pixels], done: Callable[[int], object]
) -> None:
    def tiles() -> Iterator[Pixels]:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "paint") as threads:
            for upper in range(0, shape[0], TILE):
                rows = range(upper, min(upper + TILE, shape[0]))
                columns = [range(left, min(left + TILE, shape[1])) for left in range(0, shape[1], TILE)]
                for tile in threads.map(paint, [rows] * len(columns), columns):
                    done(tile.nbytes)
                    yield tile

    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "rgb" if len(shape) == 3 else "minisblack"
    described = {"shape": shape, "dtype": np.uint8, "tile": (TILE, TILE), "compression": "zlib", "photometric": kind}
    tifffile().imwrite(path, tiles(), **described)
