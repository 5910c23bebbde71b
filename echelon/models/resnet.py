"""Residual convolutional networks; bottlenecks have their stride in the 3 × 3 convolution, as is usual now (v1.5).

Version 2 ("Identity mappings in deep residual networks") has norm and ReLU before each convolution, and nothing on the
way from sum to sum. With `small_stem` images stay as they are until the second stage, as for those of 32 × 32 pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from echelon.models.model import Model
from echelon.models.parts import Head


@dataclass(frozen=True)
class ResNetConfig:
    classes: int = 1000
    channels: int = 3
    stem_dim: int = 64
    dims: tuple[int, ...] = (256, 512, 1024, 2048)  # of what each stage gives
    depths: tuple[int, ...] = (3, 4, 6, 3)  # blocks of each stage
    bottleneck: bool = True
    version: int = 1  # or 2
    small_stem: bool = False  # a 3 × 3 convolution without stride, and no pooling


class Convolution(nn.Module):
    """A convolution that keeps the image's size but for its stride, with batch normalisation after it."""

    def __init__(self, channels: int, dim: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = _plain(channels, dim, kernel, stride)
        self.norm = nn.BatchNorm2d(dim)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out_BCHW: Tensor = self.norm(self.conv(x_BCHW))
        return out_BCHW


def _plain(channels: int, dim: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, dim, kernel, stride=stride, padding=kernel // 2, bias=False)


class Residual(nn.Module):
    """Two convolutions, or three of which the inner works on a quarter of the channels; added to what comes in."""

    def __init__(self, channels: int, dim: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        inner = dim // 4
        self.layers = nn.ModuleList(
            [Convolution(channels, inner, 1), Convolution(inner, inner, 3, stride), Convolution(inner, dim, 1)]
            if bottleneck
            else [Convolution(channels, dim, 3, stride), Convolution(dim, dim, 3)]
        )
        self.shortcut = None if channels == dim and stride == 1 else Convolution(channels, dim, 1, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out_BCHW = x_BCHW
        for layer in self.layers[:-1]:
            out_BCHW = functional.relu(layer(out_BCHW))
        out_BCHW = self.layers[-1](out_BCHW)
        return functional.relu(out_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)))


class Preactivated(nn.Module):
    """A block of version 2. Where the shape changes, the shortcut takes what the first norm and ReLU give, too."""

    def __init__(self, channels: int, dim: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        inner = dim // 4
        self.norm = nn.BatchNorm2d(channels)
        self.layers = nn.ModuleList(
            [Convolution(channels, inner, 1), Convolution(inner, inner, 3, stride)]
            if bottleneck
            else [Convolution(channels, dim, 3, stride)]
        )
        self.last = _plain(inner, dim, 1) if bottleneck else _plain(dim, dim, 3)
        self.shortcut = None if channels == dim and stride == 1 else _plain(channels, dim, 1, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        first_BCHW = out_BCHW = functional.relu(self.norm(x_BCHW))
        for layer in self.layers:
            out_BCHW = functional.relu(layer(out_BCHW))
        added_BCHW: Tensor = self.last(out_BCHW)
        return added_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(first_BCHW))


class Residuals(nn.Sequential):
    """The blocks of one stage, of which a pipeline may want only some."""

    def forward(self, x_BCHW: Tensor, wanted: Mapping[str, nn.Module]) -> Tensor:  # type: ignore[override]
        for block in wanted.values():
            x_BCHW = block(x_BCHW)
        return x_BCHW


class ResNet(Model):
    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        if len(config.dims) != len(config.depths):
            raise ValueError(f"{len(config.dims)} dims for {len(config.depths)} depths: each stage needs one of both")
        if config.version not in (1, 2):
            raise ValueError(f"version {config.version}: there are 1 and 2")
        convolution, block = (Convolution, Residual) if config.version == 1 else (_plain, Preactivated)
        self.stem = convolution(config.channels, config.stem_dim, *((3, 1) if config.small_stem else (7, 2)))
        widths = itertools.pairwise((config.stem_dim, *config.dims))
        self.stages = nn.ModuleList(
            Residuals(
                block(channels, dim, 1 if stage == 0 else 2, config.bottleneck),
                *(block(dim, dim, 1, config.bottleneck) for _ in range(depth - 1)),
            )
            for stage, ((channels, dim), depth) in enumerate(zip(widths, config.depths, strict=True))
        )
        self.norm = None if config.version == 1 else nn.BatchNorm2d(config.dims[-1])
        self.head = Head(config.dims[-1], config.classes, bias=True)
        self.finish(config)

    def forward(
        self,
        images_BCHW: Tensor,
        targets_B: Tensor | None = None,
        samples_B: Tensor | None = None,
        hidden: bool = False,
        received: Tensor | None = None,
    ) -> Tensor:
        """As the other models; `samples_B` makes no difference, since nothing is dropped."""
        if received is None:
            x_BCHW: Tensor = self.stem(images_BCHW)
            if self.config.version == 1:
                x_BCHW = functional.relu(x_BCHW)
            if not self.config.small_stem:
                x_BCHW = functional.max_pool2d(x_BCHW, 3, stride=2, padding=1)
        else:
            x_BCHW = received
        for number, stage in self.stages.named_children():
            if wanted := self.within(f"stages.{number}"):
                x_BCHW = stage(x_BCHW, wanted)
        if not self.ends:
            return x_BCHW
        if self.norm is not None:
            x_BCHW = functional.relu(self.norm(x_BCHW))
        x_BD = x_BCHW.mean((2, 3))
        return x_BD if hidden else self.head(x_BD, targets_B)  # type: ignore[no-any-return]

    def links(self) -> list[list[str]]:
        blocks = [[f"stages.{stage}.{n}"] for stage, depth in enumerate(self.config.depths) for n in range(depth)]
        return [["stem"], *blocks, ["head"] if self.config.version == 1 else ["norm", "head"]]

    def deviation(self, name: str, parameter: Tensor) -> float:
        return he_deviation(parameter)


def he_deviation(parameter: Tensor) -> float:
    """He's: the variance of what a convolution with ReLU sends back is that of what it received."""
    if parameter.dim() == 4:
        return math.sqrt(2 / (parameter.shape[0] * parameter.shape[2] * parameter.shape[3]))
    return 0.01
