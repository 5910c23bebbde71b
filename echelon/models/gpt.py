"""GPT-2 and its family: learned positions, LayerNorm before each part, GELU, biases everywhere."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from echelon.models.model import Model
from echelon.models.parts import MLP, Attention, Block, Dropout, Head, learned_positions


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 50257
    context: int = 1024
    dim: int = 768
    layers: int = 12
    heads: int = 12
    mlp_dim: int | None = None  # four times `dim`
    norm_eps: float = 1e-5
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0


class GPT(Model):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim, head_dim = config.dim, config.dim // config.heads
        gelu = functools.partial(functional.gelu, approximate="tanh")
        norm = functools.partial(nn.LayerNorm, dim, config.norm_eps)
        self.tokens, self.positions = nn.Embedding(config.vocabulary, dim), nn.Embedding(config.context, dim)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                Attention(dim, config.heads, config.heads, head_dim, causal=True, dropout=config.attention_dropout),
                MLP(dim, config.mlp_dim or 4 * dim, gelu),
                norm,
                config.dropout,
            )
            for _ in range(config.layers)
        )
        self.norm = norm()
        self.head = Head(dim, config.vocabulary)
        self.finish(config)

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        positions_S: Tensor | None = None,
        mask_BS: Tensor | None = None,
        samples_B: Tensor | None = None,
        hidden: bool = False,
        received: Tensor | None = None,
    ) -> Tensor:
        self.place.move(samples_B, positions_S)
        if received is None:
            positions = learned_positions(tokens_BS, positions_S, self.config.context)
            x_BSD: Tensor = self.dropout(self.tokens(tokens_BS) + self.positions(positions))
        else:
            x_BSD = received
        for block in self.within("blocks").values():
            x_BSD = block(x_BSD, positions_S, mask_BS, samples_B)
        if not self.ends:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        out: Tensor = x_BSD if hidden else self.head(x_BSD, targets_BS)
        return out

    def links(self) -> list[list[str]]:
        blocks = [[f"blocks.{number}"] for number in range(self.config.layers)]
        return [["tokens", "positions"], *blocks, ["norm", "head"]]
