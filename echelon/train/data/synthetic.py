"""Samples out of nothing, for trying things out and for measuring: cheap to make, and yet there is something to learn.

In a sequence each token is one to four more than the one before, so that a perfect model has a loss of ln 4. An image
is the coarse picture of its class in noise.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.train.data import chance

Numbers = NDArray[np.int64]
_CHOICES = 4  # for the next token
_NOISE = 2**20  # different numbers of noise; images differ in where they begin
_CELLS = 4  # of a picture, in each direction, where they divide it


@dataclass(frozen=True)
class SyntheticWindows:
    """Sequences; those of held-out samples begin at another `first`."""

    first: int
    count: int
    length: int
    vocabulary: int

    def __len__(self) -> int:
        return self.count

    def read(self, numbers: Numbers) -> Numbers:
        steps = 1 + chance.below(_CHOICES, self.first + numbers[:, None], np.arange(self.length + 1))
        steps[:, 0] = chance.below(self.vocabulary, self.first + numbers, -1)
        return np.asarray(steps.cumsum(1) % self.vocabulary, np.int64)


@dataclass(frozen=True)
class SyntheticImages:
    first: int
    count: int
    classes: int
    channels: int
    side: int

    def __len__(self) -> int:
        return self.count

    def batch(self, numbers: Numbers, epochs: Numbers) -> dict[str, Tensor]:
        classes = chance.below(self.classes, self.first + numbers, 0)
        places = chance.below(_NOISE, self.first + numbers, 1).tolist()
        cells, size = math.gcd(self.side, _CELLS), self.channels * self.side**2
        pictures = torch.from_numpy(2 * chance.fractions(classes[:, None], np.arange(self.channels * cells**2)) - 1)
        pictures = pictures.float().view(-1, self.channels, cells, 1, cells, 1)
        noise = _noise(_NOISE + size)
        images = torch.empty(len(numbers), self.channels, cells, self.side // cells, cells, self.side // cells)
        for image, picture, place in zip(images, pictures, places, strict=True):
            torch.add(noise[place : place + size].view_as(image), picture, out=image)
        targets = torch.from_numpy(classes)
        return {"images_BCHW": images.view(-1, self.channels, self.side, self.side), "targets_B": targets}


@dataclass(frozen=True)
class SyntheticMasks:
    """Images in which each cell is of a class, which its colour tells in noise; the targets are those of each pixel."""

    first: int
    count: int
    classes: int
    channels: int
    side: int

    def __len__(self) -> int:
        return self.count

    def batch(self, numbers: Numbers, epochs: Numbers) -> dict[str, Tensor]:
        cells, size = math.gcd(self.side, _CELLS), self.channels * self.side**2
        classes = torch.from_numpy(chance.below(self.classes, self.first + numbers[:, None], np.arange(cells**2)))
        targets_BHW = classes.view(-1, cells, cells)
        for dim in (1, 2):
            targets_BHW = targets_BHW.repeat_interleave(self.side // cells, dim)
        colours = torch.from_numpy(2 * chance.fractions(np.arange(self.classes)[:, None], np.arange(self.channels)) - 1)
        images_BCHW = colours.float()[targets_BHW].permute(0, 3, 1, 2).contiguous()
        noise, places = _noise(_NOISE + size), chance.below(_NOISE, self.first + numbers, -1).tolist()
        for image, place in zip(images_BCHW, places, strict=True):
            image.add_(noise[place : place + size].view_as(image))
        return {"images_BCHW": images_BCHW, "targets_BHW": targets_BHW}


@functools.lru_cache(maxsize=1)
def _noise(count: int) -> Tensor:
    """Standard normal numbers, made once."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0))
