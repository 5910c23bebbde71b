"""Llama and its relatives (Llama 2 and 3, Qwen 2 and 3): RMSNorm, rotary positions, SwiGLU, grouped query heads.

Qwen 2 has biases on queries, keys and values; Qwen 3 norms each head's queries and keys instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor, nn

from echelon.models.model import Model
from echelon.models.parts import Attention, Block, Head, Rope, RopeScaling, SwiGLU


@dataclass(frozen=True)
class LlamaConfig:
    vocabulary: int = 32000
    context: int = 4096  # what it was trained for; longer sequences run, too
    dim: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = None  # as many as `heads`
    head_dim: int | None = None  # `dim` / `heads`
    mlp_dim: int = 11008
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    attention_dropout: float = 0.0


class Llama(Model):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        norm = functools.partial(nn.RMSNorm, config.dim, eps=config.norm_eps)
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(
            Block(
                Attention(
                    config.dim,
                    config.heads,
                    config.kv_heads or config.heads,
                    config.head_dim or config.dim // config.heads,
                    causal=True,
                    qkv_bias=config.qkv_bias,
                    out_bias=config.out_bias,
                    qk_norm=config.norm_eps if config.qk_norm else None,
                    rope=Rope(config.rope_theta, config.rope_scaling),
                    dropout=config.attention_dropout,
                ),
                SwiGLU(config.dim, config.mlp_dim, config.mlp_bias),
                norm,
            )
            for _ in range(config.layers)
        )
        self.norm = norm()
        self.head = Head(config.dim, config.vocabulary)
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
        x_BSD = self.tokens(tokens_BS) if received is None else received
        for block in self.within("blocks").values():
            x_BSD = block(x_BSD, positions_S, mask_BS, samples_B)
        if not self.ends:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        out: Tensor = x_BSD if hidden else self.head(x_BSD, targets_BS)
        return out

    def links(self) -> list[list[str]]:
        blocks = [[f"blocks.{number}"] for number in range(self.config.layers)]
        return [["tokens"], *blocks, ["norm", "head"]]
