"""The vision transformer: an image as a sequence of patches behind one class token, whose last state is classified."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from echelon.models.model import Model
from echelon.models.parts import MLP, Attention, Block, Dropout, Head


@dataclass(frozen=True)
class ViTConfig:
    classes: int = 1000
    image: int = 224  # pixels a side
    patch: int = 16
    channels: int = 3
    dim: int = 768
    layers: int = 12
    heads: int = 12
    mlp_dim: int | None = None  # four times `dim`
    norm_eps: float = 1e-12
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0


class ViT(Model):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.image % config.patch:
            raise ValueError(f"patches of {config.patch} pixels do not tile an image of {config.image}")
        dim, head_dim = config.dim, config.dim // config.heads
        norm = functools.partial(nn.LayerNorm, dim, config.norm_eps)
        self.patches = nn.Conv2d(config.channels, dim, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, dim))
        self.position_table = nn.Parameter(torch.empty(1, 1 + (config.image // config.patch) ** 2, dim))
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                Attention(
                    dim,
                    config.heads,
                    config.heads,
                    head_dim,
                    causal=False,
                    qkv_bias=config.qkv_bias,
                    dropout=config.attention_dropout,
                ),
                MLP(dim, config.mlp_dim or 4 * dim, functional.gelu),
                norm,
                config.dropout,
            )
            for _ in range(config.layers)
        )
        self.norm = norm()
        self.head = Head(dim, config.classes, bias=True)
        self.finish(config)

    def forward(
        self,
        images_BCHW: Tensor,
        targets_B: Tensor | None = None,
        samples_B: Tensor | None = None,
        hidden: bool = False,
        received: Tensor | None = None,
    ) -> Tensor:
        side = self.config.image
        if images_BCHW.shape[-2:] != (side, side):
            raise ValueError(
                f"images of {tuple(images_BCHW.shape[-2:])} pixels, but the model takes {side} × {side}: resize them, "
                f"or build the model with image={images_BCHW.shape[-1]}"
            )
        self.place.move(samples_B, None)
        if received is None:
            patches_BSD = self.patches(images_BCHW).flatten(2).transpose(1, 2)
            x_BSD = torch.cat([self.class_token.expand(len(images_BCHW), -1, -1), patches_BSD], 1)
            x_BSD = self.dropout(x_BSD + self.position_table)
        else:
            x_BSD = received
        for block in self.within("blocks").values():
            x_BSD = block(x_BSD, None, None, samples_B)
        if not self.ends:
            return x_BSD
        x_BD = self.norm(x_BSD[:, 0])
        out: Tensor = x_BD if hidden else self.head(x_BD, targets_B)
        return out

    def links(self) -> list[list[str]]:
        blocks = [[f"blocks.{number}"] for number in range(self.config.layers)]
        return [["patches", "class_token", "position_table"], *blocks, ["norm", "head"]]
