"""AmoebaNet-D, found by evolution (Real et al. 2018), as GPipe and MPI4DL train it.

A cell takes what the two before it gave. It makes them equally wide, adds up pairs of operations on these and on
earlier sums, and gives some of the sums, one beside the other. Reduction cells halve the image and double the width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from echelon.models.model import Model
from echelon.models.parts import Head
from echelon.models.resnet import Convolution, he_deviation


@dataclass(frozen=True)
class AmoebaNetConfig:
    classes: int = 1000
    channels: int = 3
    layers: int = 18  # normal cells; a third of them before, between and behind two of the reduction cells
    filters: int = 416  # four times the channels of the stem


@dataclass(frozen=True)
class Genotype:
    """The operations that are added up, each with the number of the state that it takes: 0 is what the last cell gave,
    1 what the one before it gave, from 2 on come the sums. `joined` are the states that the cell gives.
    """

    sums: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    joined: tuple[int, ...]


NORMAL = Genotype(
    (
        (("conv 1x1", 1), ("max 3x3", 1)),
        (("same", 1), ("conv 1x7 7x1", 0)),
        (("conv 1x1", 0), ("conv 1x7 7x1", 0)),
        (("max 3x3", 2), ("same", 2)),
        (("mean 3x3", 1), ("conv 1x1", 5)),
    ),
    (0, 3, 4, 6),  # the authors' program has these, and so about the sizes that GPipe reports; their paper has 4, 5, 6
)
REDUCTION = Genotype(
    (
        (("max 2x2", 0), ("max 3x3", 0)),
        (("same", 2), ("conv 3x3", 1)),
        (("conv 1x7 7x1", 2), ("max 3x3", 2)),
        (("same", 3), ("max 2x2", 1)),
        (("mean 3x3", 2), ("conv 1x1", 3)),
    ),
    (4, 5, 6),
)


class Rectified(nn.Module):
    """ReLU, a convolution that keeps the image's size but for its stride, and batch normalisation."""

    def __init__(self, channels: int, dim: int, kernel: tuple[int, int] = (1, 1), stride: int = 1) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.conv = nn.Conv2d(channels, dim, kernel, stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(dim)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out_BCHW: Tensor = self.norm(self.conv(functional.relu(x_BCHW)))
        return out_BCHW


class Halved(nn.Module):
    """An image of half the size, of which one half of the channels sees the even rows and columns, one the odd."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, dim // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, dim // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(dim)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = functional.relu(x_BCHW)
        shifted_BCHW = functional.pad(x_BCHW[:, :, 1:, 1:], (0, 1, 0, 1))
        out_BCHW: Tensor = self.norm(torch.cat([self.even(x_BCHW), self.odd(shifted_BCHW)], 1))
        return out_BCHW


def _operation(name: str, dim: int, stride: int) -> nn.Module:
    """What a genotype names. All give as many rows and columns, also of images with odd sizes."""
    inner = dim // 4
    match name:
        case "same":
            return nn.Identity()
        case "mean 3x3":
            return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        case "max 3x3":
            return nn.MaxPool2d(3, stride, padding=1)
        case "max 2x2":
            return nn.MaxPool2d(2, stride, ceil_mode=True)
        case "conv 1x1":
            return Rectified(dim, dim, stride=stride)
        case "conv 3x3":
            kernels = [(3, 3)]
        case _:
            kernels = [(1, 7), (7, 1)]
    between = [Rectified(inner, inner, kernel, stride) for kernel in kernels]
    return nn.Sequential(Rectified(dim, inner), *between, Rectified(inner, dim))


class Cell(nn.Module):
    """`channels` are those of the last cell and of the one before it, which is larger if the last one `was_reduced`."""

    def __init__(self, channels: tuple[int, int], dim: int, genotype: Genotype, was_reduced: bool) -> None:
        super().__init__()
        self.genotype = genotype
        self.last = Rectified(channels[0], dim)
        self.before = (Halved if was_reduced else Rectified)(channels[1], dim)
        self.operations = nn.ModuleList(
            _operation(name, dim, 2 if genotype is REDUCTION and state < 2 else 1)
            for pair in genotype.sums
            for name, state in pair
        )

    def forward(self, last_BCHW: Tensor, before_BCHW: Tensor) -> Tensor:
        states = [self.last(last_BCHW), self.before(before_BCHW)]
        operations = iter(self.operations)
        for (_, left), (_, right) in self.genotype.sums:
            states.append(next(operations)(states[left]) + next(operations)(states[right]))
        return torch.cat([states[state] for state in self.genotype.joined], 1)


class AmoebaNet(Model):
    def __init__(self, config: AmoebaNetConfig) -> None:
        super().__init__()
        if config.layers % 3:
            raise ValueError(f"layers={config.layers} cannot be shared by three stages evenly: take a multiple of 3")
        if config.filters % 8:
            raise ValueError(f"filters={config.filters}: take a multiple of 8, since cells work on an eighth of them")
        dim = config.filters // 4
        self.stem = Convolution(config.channels, dim, 3, 2)
        stage = [NORMAL] * (config.layers // 3)
        channels, was_reduced = (dim, dim), False
        self.cells = nn.ModuleList()
        for genotype in [REDUCTION, REDUCTION, *stage, REDUCTION, *stage, REDUCTION, *stage]:
            is_reduced = genotype is REDUCTION
            dim *= 2 if is_reduced else 1
            self.cells.append(Cell(channels, dim, genotype, was_reduced))
            channels, was_reduced = (dim * len(genotype.joined), channels[0]), is_reduced
        self.head = Head(channels[0], config.classes, bias=True)
        self.finish(config)

    def forward(
        self,
        images_BCHW: Tensor,
        targets_B: Tensor | None = None,
        samples_B: Tensor | None = None,
        hidden: bool = False,
        received: tuple[Tensor, ...] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """As ResNet's. Between links goes what the last two gave, the last one's first; from the stem and to the head
        only the one there is, or is need of.
        """
        stream = (self.stem(images_BCHW),) if received is None else received
        for cell in self.within("cells").values():
            stream = (cell(stream[0], stream[-1]), stream[0])
        if self.span is not None and not self.ends:
            return stream[:1] if self.span.stop == len(self._links) - 1 else stream
        x_BD = stream[0].mean((2, 3))
        out: Tensor = x_BD if hidden else self.head(x_BD, targets_B)
        return out

    def links(self) -> list[list[str]]:
        return [["stem"], *([f"cells.{number}"] for number in range(len(self.cells))), ["head"]]

    def deviation(self, name: str, parameter: Tensor) -> float:
        return he_deviation(parameter)
