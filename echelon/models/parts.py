"""The parts that models are built from. Each is an ordinary module; what a strategy or an app replaces is an attribute.

The names of tensors end in their dimensions: B batch, S sequence, T keys of a sequence, H query heads, G key-value
heads, N heads that share a key (and that key, and its value), D features (of a token, or of one head).

The seams: `Attention.attend`, `Head.project`, `Head.loss`, and every `attention`, `mlp` and block as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from echelon.models.dropout import Dropout, Place

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Dropout",
    "Head",
    "Place",
    "Rope",
    "RopeScaling",
    "SwiGLU",
    "attend",
    "cross_entropy",
    "learned_positions",
]

IGNORE = -100  # a target that does not count


def attend(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    causal: bool,
    mask_BS: Tensor | None = None,
    positions_S: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Attention over a whole sequence. Where positions are given, causal means by them and not by the tokens' order.

    `mask_BS` is true for the keys that may be seen. Only with `dropout` are the weights made one by one.
    """
    by_order = causal and positions_S is None and mask_BS is None and dropout is None
    seen = None if by_order else _seen(q_BHSD, causal, mask_BS, positions_S)
    if dropout is None:
        shared = q_BHSD.shape[1] != k_BGSD.shape[1]
        return functional.scaled_dot_product_attention(
            q_BHSD, k_BGSD, v_BGSD, attn_mask=seen, is_causal=by_order, enable_gqa=shared
        )
    k_BHSD, v_BHSD = (x.repeat_interleave(q_BHSD.shape[1] // x.shape[1], 1) for x in (k_BGSD, v_BGSD))
    scores_BHST = q_BHSD @ k_BHSD.transpose(-2, -1) / math.sqrt(q_BHSD.shape[-1])
    if seen is not None:
        scores_BHST = scores_BHST.masked_fill(~seen, -math.inf)
    return dropout.weights(scores_BHST.softmax(-1)) @ v_BHSD


def _seen(q_BHSD: Tensor, causal: bool, mask_BS: Tensor | None, positions_S: Tensor | None) -> Tensor | None:
    """Which keys each query sees, in a shape that broadcasts to BHST; None where each sees all."""
    seen = None if mask_BS is None else mask_BS.bool()[:, None, None, :]
    if causal:
        length = q_BHSD.shape[2]
        positions = torch.arange(length, device=q_BHSD.device) if positions_S is None else positions_S
        before_ST = positions[:, None] >= positions
        seen = before_ST if seen is None else seen & before_ST
    return seen


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and later stretch the slow frequencies to contexts longer than those first trained."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True)
class Rope:
    """Rotary positions. Nothing is kept: a table in a buffer would be rounded with the model's parameters."""

    theta: float
    scaling: RopeScaling | None = None

    def frequencies(self, head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        frequencies = self.theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)
        if self.scaling is None:
            return frequencies
        turns = self.scaling.original_context * frequencies / (2 * math.pi)  # made in the original context
        low, high = self.scaling.low_frequency_factor, self.scaling.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.scaling.factor)

    def rotate(self, x_BHSD: Tensor, positions_S: Tensor) -> Tensor:
        dtype = torch.promote_types(x_BHSD.dtype, torch.float32)
        angles = positions_S.to(dtype)[:, None] * self.frequencies(x_BHSD.shape[-1], x_BHSD.device, dtype)
        cos, sin = angles.cos(), angles.sin()
        left, right = x_BHSD.to(dtype).chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_BHSD.dtype)


class Attention(nn.Module):
    """Self-attention. It never knows how many heads the model has: a split of `qkv`'s rows is a split of the heads.

    The rows of `qkv` come by key-value head: its query heads, its key, its value. `out` takes the heads in that order.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        causal: bool,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm: float | None = None,  # the epsilon of RMS norms over each head's queries and keys
        rope: Rope | None = None,
        dropout: float = 0.0,  # of the weights
    ) -> None:
        super().__init__()
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly")
        self.head_dim, self.queries_per_key = head_dim, heads // kv_heads
        self.causal, self.rope, self.dropout = causal, rope, dropout
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=qkv_bias)
        self.q_norm = None if qk_norm is None else nn.RMSNorm(head_dim, eps=qk_norm)
        self.k_norm = None if qk_norm is None else nn.RMSNorm(head_dim, eps=qk_norm)
        self.weights_dropout = Dropout(dropout)
        self.out = nn.Linear(heads * head_dim, dim, bias=out_bias)
        self.attend: Callable[..., Tensor] = attend

    def forward(self, x_BSD: Tensor, positions_S: Tensor | None = None, mask_BS: Tensor | None = None) -> Tensor:
        qkv_BSGND = self.qkv(x_BSD).unflatten(-1, (-1, self.queries_per_key + 2, self.head_dim))
        q_BHSD = qkv_BSGND[..., :-2, :].flatten(2, 3).transpose(1, 2)
        k_BGSD, v_BGSD = (qkv_BSGND[..., place, :].transpose(1, 2) for place in (-2, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q_BHSD, k_BGSD = self.q_norm(q_BHSD), self.k_norm(k_BGSD)
        if self.rope is not None:
            positions = torch.arange(q_BHSD.shape[2], device=q_BHSD.device) if positions_S is None else positions_S
            q_BHSD, k_BGSD = self.rope.rotate(q_BHSD, positions), self.rope.rotate(k_BGSD, positions)
        more = {"dropout": self.weights_dropout} if self.training and self.dropout else {}
        out_BHSD = self.attend(
            q_BHSD, k_BGSD, v_BGSD, causal=self.causal, mask_BS=mask_BS, positions_S=positions_S, **more
        )
        out_BSD: Tensor = self.out(out_BHSD.transpose(1, 2).flatten(2))
        return out_BSD


class MLP(nn.Module):
    """Up, an activation, down."""

    def __init__(self, dim: int, hidden: int, activation: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)
        self.activation = activation

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down(self.activation(self.up(x_BSD)))
        return out_BSD


class SwiGLU(nn.Module):
    """Up, gated by the SiLU of a second projection, down."""

    def __init__(self, dim: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=bias), nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down(functional.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return out_BSD


class Block(nn.Module):
    """Attention, then an MLP, each added to the stream. The norms stand before each or, `post_norm`, after each sum."""

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.mlp_norm, self.mlp = norm(), mlp
        self.attention_dropout, self.mlp_dropout = Dropout(dropout), Dropout(dropout)
        self.post_norm = post_norm

    def forward(
        self,
        x_BSD: Tensor,
        positions_S: Tensor | None = None,
        mask_BS: Tensor | None = None,
        samples_B: Tensor | None = None,
    ) -> Tensor:
        self.mlp_dropout.place.move(samples_B, positions_S)  # also when a block alone is computed again
        out_BSD: Tensor
        if self.post_norm:
            x_BSD = self.attention_norm(x_BSD + self.attention_dropout(self.attention(x_BSD, positions_S, mask_BS)))
            out_BSD = self.mlp_norm(x_BSD + self.mlp_dropout(self.mlp(x_BSD)))
        else:
            x_BSD = x_BSD + self.attention_dropout(self.attention(self.attention_norm(x_BSD), positions_S, mask_BS))
            out_BSD = x_BSD + self.mlp_dropout(self.mlp(self.mlp_norm(x_BSD)))
        return out_BSD


def learned_positions(tokens_BS: Tensor, positions_S: Tensor | None, context: int) -> Tensor:
    """Those to look up in a table for `context` of them."""
    if positions_S is not None:
        return positions_S
    if tokens_BS.shape[1] > context:
        raise ValueError(
            f"{tokens_BS.shape[1]} tokens, but the model has learned positions for {context}: cut the sequence, or "
            f"build the model with context={tokens_BS.shape[1]}"
        )
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device)


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """The sum of the targets' cross-entropies, in fp32 at least: whoever trains divides by the count of all ranks."""
    logits = functional.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")


class Head(nn.Module):
    """From hidden states to logits or, where targets are given, to the sum of their losses."""

    def __init__(self, dim: int, classes: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))
        self.bias = nn.Parameter(torch.empty(classes)) if bias else None
        self.project: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear
        self.loss: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor] = cross_entropy

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.project(hidden, self.weight, self.bias)
        return self.loss(hidden, self.weight, self.bias, targets)
