"""BERT for masked language modelling: every token sees all, LayerNorm after each sum, a transform before the head."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from echelon.models.model import Model
from echelon.models.parts import MLP, Attention, Block, Dropout, Head, learned_positions


@dataclass(frozen=True)
class BertConfig:
    vocabulary: int = 30522
    context: int = 512
    segments: int = 2
    dim: int = 768
    layers: int = 12
    heads: int = 12
    mlp_dim: int | None = None  # four times `dim`
    norm_eps: float = 1e-12
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0


class MaskedHead(Head):
    """A head after one more layer."""

    def __init__(self, dim: int, vocabulary: int, norm_eps: float) -> None:
        super().__init__(dim, vocabulary, bias=True)
        self.dense, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim, norm_eps)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(self.norm(functional.gelu(self.dense(hidden))), targets)


class Bert(Model):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        dim, head_dim = config.dim, config.dim // config.heads
        norm = functools.partial(nn.LayerNorm, dim, config.norm_eps)
        self.tokens, self.positions = nn.Embedding(config.vocabulary, dim), nn.Embedding(config.context, dim)
        self.segments = nn.Embedding(config.segments, dim)
        self.embedding_norm = norm()
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                Attention(dim, config.heads, config.heads, head_dim, causal=False, dropout=config.attention_dropout),
                MLP(dim, config.mlp_dim or 4 * dim, functional.gelu),
                norm,
                config.dropout,
                post_norm=True,
            )
            for _ in range(config.layers)
        )
        self.head = MaskedHead(dim, config.vocabulary, config.norm_eps)
        self.finish(config)

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        positions_S: Tensor | None = None,
        mask_BS: Tensor | None = None,
        samples_B: Tensor | None = None,
        segments_BS: Tensor | None = None,
        hidden: bool = False,
        received: Tensor | None = None,
    ) -> Tensor:
        """`segments_BS` says to which of a pair of texts each token belongs; without it, all to the first."""
        self.place.move(samples_B, positions_S)
        if received is None:
            positions = learned_positions(tokens_BS, positions_S, self.config.context)
            segments = torch.zeros_like(tokens_BS) if segments_BS is None else segments_BS
            x_BSD = self.tokens(tokens_BS) + self.positions(positions) + self.segments(segments)
            x_BSD = self.dropout(self.embedding_norm(x_BSD))
        else:
            x_BSD = received
        for block in self.within("blocks").values():
            x_BSD = block(x_BSD, positions_S, mask_BS, samples_B)
        out: Tensor = x_BSD if hidden or not self.ends else self.head(x_BSD, targets_BS)
        return out

    def links(self) -> list[list[str]]:
        blocks = [[f"blocks.{number}"] for number in range(self.config.layers)]
        return [["tokens", "positions", "segments", "embedding_norm"], *blocks, ["head"]]

    def deviation(self, name: str, parameter: Tensor) -> float:
        return 0.02
