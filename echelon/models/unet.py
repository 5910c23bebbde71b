"""U-Net: a class for each pixel. Levels of ever smaller images, and the way back up, on which each level also sees what
the level of its size on the way down gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from echelon.models.chain import Edge
from echelon.models.model import Model
from echelon.models.parts import IGNORE
from echelon.models.resnet import Convolution, he_deviation


@dataclass(frozen=True)
class UNetConfig:
    classes: int = 2
    channels: int = 3
    dim: int = 64  # of the first level; each further one has twice as many
    depth: int = 4  # how often the image is halved


class Level(nn.Module):
    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Convolution(channels, dim, 3), Convolution(dim, dim, 3)])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        for layer in self.layers:
            x_BCHW = functional.relu(layer(x_BCHW))
        return x_BCHW


class Rise(nn.Module):
    """A level on the way up. Of an odd size half is rounded up, so that twice that is cut off where the image ends."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * dim, dim, 2, stride=2)
        self.level = Level(2 * dim, dim)

    def forward(self, x_BCHW: Tensor, skipped_BCHW: Tensor) -> Tensor:
        height, width = skipped_BCHW.shape[2:]
        out_BCHW: Tensor = self.level(torch.cat([skipped_BCHW, self.up(x_BCHW)[:, :, :height, :width]], 1))
        return out_BCHW


class UNet(Model):
    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        dims = [config.dim * 2**level for level in range(config.depth + 1)]
        channels = [config.channels, *dims]
        self.down = nn.ModuleList(Level(channels[level], dims[level]) for level in range(config.depth))
        self.bottom = Level(channels[-2], dims[-1])
        self.up = nn.ModuleList(Rise(dim) for dim in reversed(dims[:-1]))
        self.head = nn.Conv2d(config.dim, config.classes, 1)
        self.skips = tuple((level, 2 * config.depth - level) for level in range(config.depth))
        self.finish(config)

    def forward(
        self,
        images_BCHW: Tensor,
        targets_BHW: Tensor | None = None,
        samples_B: Tensor | None = None,
        hidden: bool = False,
        received: Mapping[Edge, Any] | None = None,
    ) -> Tensor | dict[Edge, Tensor]:
        """The logits, as an image (BKHW), or the sum of the pixels' losses; `samples_B` makes no difference. Of a span
        that is not the last: what it gives to others, by edge.
        """
        depth, span = self.config.depth, range(len(self._links)) if self.span is None else self.span
        flowing = dict(received or {})
        x_BCHW = flowing.pop((span.start - 1, span.start)) if span.start else images_BCHW
        for link in span:
            part = self.get_submodule(self.parts(link)[0])
            x_BCHW = part(x_BCHW, flowing.pop((2 * depth - link, link))) if link > depth else part(x_BCHW)
            if link < depth:
                flowing[link, 2 * depth - link] = x_BCHW
                x_BCHW = functional.max_pool2d(x_BCHW, 2, ceil_mode=True)
        if not self.ends:
            return flowing | {(span.stop - 1, span.stop): x_BCHW}
        if hidden:
            return x_BCHW
        logits_BKHW: Tensor = self.head(x_BCHW)
        if targets_BHW is None:
            return logits_BKHW
        logits_BKHW = logits_BKHW.to(torch.promote_types(logits_BKHW.dtype, torch.float32))
        return functional.cross_entropy(logits_BKHW, targets_BHW, ignore_index=IGNORE, reduction="sum")

    def links(self) -> list[list[str]]:
        down, up = ([[f"{way}.{level}"] for level in range(self.config.depth)] for way in ("down", "up"))
        links = [*down, ["bottom"], *up]
        return [*links[:-1], [*links[-1], "head"]]

    def deviation(self, name: str, parameter: Tensor) -> float:
        return he_deviation(parameter)
