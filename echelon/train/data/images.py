"""Folders of images: `FOLDER/CLASS/….jpg`, the classes numbered in the order of their names.

To train, an image is cut at random and mirrored half the time, otherwise in each epoch, by a hash of seed, epoch and
sample; to evaluate, its middle is taken. Images are decoded by several threads, since Pillow lets others run meanwhile.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.train.data import chance
from echelon.train.data.errors import DataError

Numbers = NDArray[np.int64]
Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
MODES = {1: "L", 3: "RGB"}  # by the model's channels
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which models expect
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of what is cut out, against the whole image and of width to height
_MIDDLE = 0.875  # of the shorter side, to evaluate


@dataclass(frozen=True)
class Image:
    path: Path
    target: int  # the number of its class


@dataclass(frozen=True)
class ImageFolder:
    """Images for a model that takes squares of `side` pixels."""

    images: list[Image]
    side: int
    channels: int
    seed: int | None  # of how images are cut; None: the middle

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, numbers: Numbers, epochs: Numbers) -> dict[str, Tensor]:
        images = threads().map(self._read, numbers.tolist(), epochs.tolist())
        targets = torch.tensor([self.images[number].target for number in numbers])
        return {"images_BCHW": torch.stack(list(images)), "targets_B": targets}

    def _read(self, number: int, epoch: int) -> Tensor:
        path = self.images[number].path
        try:
            with pillow().open(path) as file:
                box, mirrored = self._cut(file.size, number, epoch)
                image = file.convert(MODES[self.channels]).resize((self.side, self.side), _BILINEAR, box)
        except (OSError, ValueError, SyntaxError, pillow().DecompressionBombError) as error:
            raise DataError(f"{path} cannot be read as an image: {error}") from None
        pixels_HWC = torch.from_numpy(np.array(image)).view(self.side, self.side, self.channels)
        pixels_HWC = pixels_HWC.flip(1) if mirrored else pixels_HWC
        mean, deviation = (torch.tensor(values[: self.channels]) for values in (MEAN, DEVIATION))
        return ((pixels_HWC / 255 - mean) / deviation).permute(2, 0, 1).contiguous()

    def _cut(self, size: tuple[int, int], number: int, epoch: int) -> tuple[Box, bool]:
        if self.seed is None:
            return middle(size), False
        return random_cut(size, chance.fractions(self.seed, epoch, number, np.arange(5)).tolist())


def middle(size: tuple[int, int]) -> Box:
    """The square in the middle of an image."""
    edge = _MIDDLE * min(size)
    left, upper = ((whole - edge) / 2 for whole in size)
    return left, upper, left + edge, upper + edge


def random_cut(size: tuple[int, int], chances: list[float]) -> tuple[Box, bool]:
    """What five numbers from 0 to 1 cut out of an image, of any area, shape and place, and whether it is mirrored."""
    area = size[0] * size[1] * (_AREA[0] + chances[0] * (_AREA[1] - _AREA[0]))
    ratio = math.exp(math.log(_RATIO[0]) + chances[1] * math.log(_RATIO[1] / _RATIO[0]))
    width, height = (max(1.0, min(edge, most)) for edge, most in zip(_edges(area, ratio), size, strict=True))
    left, upper = (size[0] - width) * chances[2], (size[1] - height) * chances[3]
    return (left, upper, left + width, upper + height), chances[4] < 0.5


def find_images(folder: Path, classes: Mapping[str, int]) -> list[Image]:
    """All images below the folders of some classes, sorted by path."""
    found = [Image(path, number) for name, number in classes.items() for path in _below(folder / name)]
    if not found:
        raise DataError(f"the folders of classes in {folder} hold no images ({', '.join(sorted(SUFFIXES))})")
    return found


def find_classes(folder: Path, most: int) -> dict[str, int]:
    """The classes of a folder, numbered by name."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    names = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not names:
        raise DataError(f"{folder} has no folders of classes: images are in FOLDER/CLASS/…")
    if len(names) > most:
        raise DataError(f"{folder} has {len(names)} classes, but the model {most}: set [model] classes = {len(names)}")
    return {name: number for number, name in enumerate(names)}


def check_channels(channels: int) -> None:
    if channels not in MODES:
        raise DataError(f"images have 1 or 3 channels, but [model] channels = {channels}")


def split(images: Iterable[Image], folder: Path, share: float) -> tuple[list[Image], list[Image]]:
    """Images to train on, and about a `share` that is held out, by a hash of the image's path in the folder: an image
    stays on its side when others are added.
    """
    train: list[Image] = []
    held_out: list[Image] = []
    for image in images:
        name = image.path.relative_to(folder).as_posix()
        place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64
        (held_out if place < share else train).append(image)
    return train, held_out


def pillow() -> Any:
    try:
        from PIL import Image as library
    except ModuleNotFoundError:
        raise DataError("to read images: pip install pillow") from None
    return library


_BILINEAR = 2  # as Pillow numbers it


def _edges(area: float, ratio: float) -> tuple[float, float]:
    return math.sqrt(area * ratio), math.sqrt(area / ratio)


def _below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


@functools.cache
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "image")
