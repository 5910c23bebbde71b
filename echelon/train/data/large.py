"""Folders of images too large for one rank: each reads the pixels of its tile, and no more than it must.

Images are not resized. Of each, a window of the model's size is taken: to train at a random place and mirrored half the
time, by a hash of seed, epoch and sample, to evaluate from the middle. All ranks know the window; a rank reads its tile
of it. Of a TIFF only the segments (tiles or strips) that meet the tile are read and decoded, by several threads. A PNG
has no places to begin at: all of it is decoded, and then cut.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.parallel.loss import IGNORED
from echelon.parallel.spatial.cut import bounds
from echelon.train.data import chance, images
from echelon.train.data.errors import DataError
from echelon.train.data.images import Image
from echelon.train.data.source import WHOLE, Tile
from echelon.train.data.tiff import tifffile

Numbers = NDArray[np.int64]
Pixels = NDArray[np.uint8]
SUFFIXES = {".png", ".tif", ".tiff"}
_NOT_COUNTED = 255  # in a mask
_SAMPLES = range(1, 5)  # of a pixel: grey or RGB, with or without opacity
_GREY, _RGB, _PALETTE, _YCBCR = 1, 2, 3, 6  # as TIFF numbers them


class Picture(Protocol):
    """An opened file."""

    @property
    def size(self) -> tuple[int, int]: ...  # rows, columns

    @property
    def palette(self) -> bool: ...  # pixels are numbers of colours

    def read(self, rows: range, columns: range) -> Pixels:
        """Rows, columns, samples."""
        ...


@dataclass(frozen=True)
class Window:
    """A square of an image: where it begins, and whether it is mirrored, left to right."""

    side: int
    upper: int
    left: int
    mirrored: bool

    def read(self, picture: Picture, rows: range, columns: range) -> Pixels:
        """Some rows and columns of the window, counted as it is seen: mirrored, the first is the last of the image."""
        if self.mirrored:
            columns = range(self.side - columns.stop, self.side - columns.start)
        pixels_HWC = picture.read(_moved(rows, self.upper), _moved(columns, self.left))
        return pixels_HWC[:, ::-1] if self.mirrored else pixels_HWC


@dataclass(frozen=True)
class LargeImages:
    """Images for a model that takes squares of `side` pixels, cut into tiles."""

    images: list[Image]
    side: int
    channels: int
    seed: int | None  # of where windows are; None: in the middle
    masks: Mapping[Path, Path] | None = None  # with a class for each pixel; None: images have one each
    classes: int = _NOT_COUNTED  # that a mask may have

    def __len__(self) -> int:
        return len(self.images)

    def batch(
        self, numbers: Numbers, epochs: Numbers, tile: Tile | None = WHOLE, of_targets: Tile = WHOLE
    ) -> dict[str, Tensor]:
        """A tile of each window, or none; with masks also their classes, of a tile of their own."""
        of_images, of_masks = (
            [bounds(self.side, count)[n] for n, count in each] for each in (tile or WHOLE, of_targets)
        )
        shape = len(numbers), self.channels, *map(len, of_images)
        images_BCHW = torch.empty(shape, device=None if tile else "meta")
        targets_BHW = torch.empty(len(numbers), *map(len, of_masks), dtype=torch.int64)

        def read(place: int) -> None:
            path = self.images[numbers[place]].path
            with opened(path) as picture:
                if picture.palette:
                    raise DataError(f"{path} has a palette of colours: save it as RGB")
                size = picture.size
                window = self._window(path, size, int(numbers[place]), int(epochs[place]))
                if tile:
                    _normalise(_converted(window.read(picture, *of_images), self.channels), images_BCHW[place])
            if self.masks is not None:
                targets_HW = self._targets(self.masks[path], size, window, *of_masks)
                targets_BHW[place] = torch.from_numpy(targets_HW)

        if tile or self.masks is not None:
            list(images.threads().map(read, range(len(numbers))))
        if self.masks is not None:
            return {"images_BCHW": images_BCHW, "targets_BHW": targets_BHW}
        return {
            "images_BCHW": images_BCHW,
            "targets_B": torch.tensor([self.images[number].target for number in numbers]),
        }

    def _window(self, path: Path, size: tuple[int, int], number: int, epoch: int) -> Window:
        room = [whole - self.side for whole in size]
        if min(room) < 0:
            raise DataError(
                f"{path} has {size[0]} x {size[1]} pixels, but the model takes {self.side} x {self.side}: set "
                f"[data] image = {min(size)} or less, or leave it out"
            )
        if self.seed is None:
            return Window(self.side, room[0] // 2, room[1] // 2, mirrored=False)
        *places, mirror = chance.fractions(self.seed, epoch, number, np.arange(3)).tolist()
        upper, left = (int(place * (most + 1)) for place, most in zip(places, room, strict=True))
        return Window(self.side, upper, left, mirror < 0.5)

    def _targets(self, path: Path, size: tuple[int, int], window: Window, rows: range, columns: range) -> Numbers:
        with opened(path) as picture:
            if picture.size != size:
                raise DataError(
                    f"{path} has {picture.size[0]} x {picture.size[1]} pixels, but its image {size[0]} x {size[1]}"
                )
            numbers_HWC = window.read(picture, rows, columns)
        if numbers_HWC.shape[2] != 1:
            raise DataError(f"{path} is a mask with colours: save one 8-bit number a pixel, that of its class")
        numbers_HW = numbers_HWC[..., 0].astype(np.int64)
        numbers_HW[numbers_HW == _NOT_COUNTED] = IGNORED
        if numbers_HW.size and (highest := numbers_HW.max()) >= self.classes:
            raise DataError(f"{path} has class {highest}, but the model {self.classes}: set [model] classes")
        return numbers_HW


def find_large_images(folder: Path, classes: Mapping[str, int]) -> list[Image]:
    """All images below the folders of some classes, sorted by path."""
    found = images.find_images(folder, classes)
    for image in found:
        if image.path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{image.path} is neither PNG nor TIFF: save large images as tiled TIFF")
    return found


def find_masks(folder: Path) -> dict[Path, Path]:
    """The mask of each image: FOLDER/masks/NAME for FOLDER/images/NAME, sorted by name."""
    found, masks = (_by_name(folder / each) for each in ("images", "masks"))
    if not found:
        raise DataError(f"{folder / 'images'} holds no images ({', '.join(sorted(SUFFIXES))})")
    for name, path in found.items():
        if name not in masks:
            raise DataError(f"{path} has no mask: it would be {folder / 'masks' / name}.png, .tif or .tiff")
    return {path: masks[name] for name, path in found.items()}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Picture]:
    """A file to read boxes of; what is wrong with it, also while it is read, is said with its name."""
    try:
        with _png(path) if path.suffix.lower() == ".png" else _tiff(path) as picture:
            yield picture
    except DataError:
        raise
    except Exception as error:  # the libraries have no common one
        raise DataError(f"{path} cannot be read as an image: {str(error) or repr(error)}") from None


@dataclass(frozen=True)
class Tiff:
    page: Any

    @property
    def size(self) -> tuple[int, int]:
        return self.page.imagelength, self.page.imagewidth

    @property
    def palette(self) -> bool:
        return bool(self.page.photometric == _PALETTE)

    def read(self, rows: range, columns: range) -> Pixels:
        page, file = self.page, self.page.parent.filehandle
        planes, _, _, _, samples = page.shaped
        pixels_PHWC = np.zeros((planes, len(rows), len(columns), samples), np.uint8)

        def decode(segment: tuple[bytes | None, int]) -> None:
            encoded, index = segment
            if encoded is None:  # left out of the file
                return
            if len(encoded) < page.databytecounts[index]:
                raise DataError(f"{file.path} cannot be read as an image: it was cut off")
            [piece_HWC], (plane, _, upper, left, _), _ = page.decode(
                encoded, index, jpegtables=page.jpegtables, jpegheader=page.jpegheader
            )
            height, width = piece_HWC.shape[:2]
            tall, wide = _common(rows, upper, height), _common(columns, left, width)
            pixels_PHWC[plane, _slice(tall, rows.start), _slice(wide, columns.start)] = piece_HWC[
                _slice(tall, upper), _slice(wide, left)
            ]

        wanted = self.segments(rows, columns)
        places = [[known[index] for index in wanted] for known in (page.dataoffsets, page.databytecounts)]
        for some in file.read_segments(*places, wanted, flat=False):
            list(_decoders().map(decode, some))
        return pixels_PHWC[0] if planes == 1 else pixels_PHWC[..., 0].transpose(1, 2, 0)

    def segments(self, rows: range, columns: range) -> list[int]:
        """The numbers of those that meet a box."""
        page = self.page
        height, width = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, page.imagewidth)
        down, across = -(-page.imagelength // height), -(-page.imagewidth // width)
        return [
            (plane * down + row) * across + column
            for plane in range(page.shaped[0])
            for row in range(rows.start // height, -(-rows.stop // height))
            for column in range(columns.start // width, -(-columns.stop // width))
        ]


@dataclass(frozen=True)
class Png:
    file: Any

    @property
    def size(self) -> tuple[int, int]:
        return self.file.height, self.file.width

    @property
    def palette(self) -> bool:
        return bool(self.file.mode == "P")

    def read(self, rows: range, columns: range) -> Pixels:
        box_HW = np.asarray(self.file)[_slice(rows, 0), _slice(columns, 0)]
        return np.array(box_HW).reshape(len(rows), len(columns), -1 if box_HW.size else len(self.file.getbands()))


@contextlib.contextmanager
def _tiff(path: Path) -> Iterator[Tiff]:
    with tifffile().TiffFile(path) as file:
        page = file.pages.first
        if page.dtype != np.uint8 or page.bitspersample != 8:
            raise DataError(f"{path} has samples of {page.bitspersample} bits: save it with 8")
        planes, depth, _, _, samples = page.shaped
        kinds = _GREY, _RGB, _PALETTE, _YCBCR
        if page.photometric not in kinds or depth != 1 or planes * samples not in _SAMPLES:
            raise DataError(f"{path} is neither grey nor RGB: save it as one of these")
        try:
            page.decode(None, 0)
        except (ValueError, ImportError):
            raise DataError(
                f"{path} is compressed as {page.compression.name}: pip install imagecodecs, or save it with deflate"
            ) from None
        yield Tiff(page)


@contextlib.contextmanager
def _png(path: Path) -> Iterator[Png]:
    """By the format's own reader: `Image.open` would refuse a very large image, unless a limit of the whole process is
    raised.
    """
    images.pillow()
    from PIL.PngImagePlugin import PngImageFile

    with PngImageFile(path) as file:
        if file.mode not in {"L", "LA", "RGB", "RGBA", "P"} or _is_scaled(file):
            raise DataError(f"{path} has samples of other than 8 bits: save it with 8")
        yield Png(file)


def _is_scaled(file: Any) -> bool:
    """Whether samples have other than 8 bits, and Pillow would make 8 of them; numbers of colours it leaves alone."""
    return file.mode != "P" and any(";" in str(tile[3]) for tile in file.tile)


def _converted(pixels_HWC: Pixels, channels: int) -> Pixels:
    """As grey or RGB, without opacity."""
    if pixels_HWC.shape[2] == channels:
        return pixels_HWC
    squeezed = pixels_HWC[..., 0] if pixels_HWC.shape[2] == 1 else pixels_HWC
    converted = images.pillow().fromarray(np.ascontiguousarray(squeezed)).convert(images.MODES[channels])
    return np.array(converted).reshape(*pixels_HWC.shape[:2], channels)


def _normalise(pixels_HWC: Pixels, out_CHW: Tensor) -> None:
    """As `ImageFolder` does."""
    out_CHW.copy_(torch.from_numpy(np.ascontiguousarray(pixels_HWC)).permute(2, 0, 1))
    mean, deviation = (
        torch.tensor(values[: len(out_CHW)]).view(-1, 1, 1) for values in (images.MEAN, images.DEVIATION)
    )
    out_CHW.div_(255).sub_(mean).div_(deviation)


def _by_name(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: images are in FOLDER/images, their masks in FOLDER/masks")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in SUFFIXES and path.is_file():
            if path.stem in found:
                raise DataError(f"{found[path.stem]} and {path} have the same name: remove one")
            found[path.stem] = path
    return found


def _moved(places: range, by: int) -> range:
    return range(places.start + by, places.stop + by)


def _common(wanted: range, first: int, count: int) -> range:
    """What a segment has of it."""
    low = max(wanted.start, first)
    return range(low, max(low, min(wanted.stop, first + count)))


def _slice(places: range, first: int) -> slice:
    return slice(places.start - first, places.stop - first)


@functools.cache
def _decoders() -> ThreadPoolExecutor:
    """Beside the threads of images, which wait for these."""
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "segment")
