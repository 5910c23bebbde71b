"""Ulysses: an all-to-all turns a piece of the sequence with all heads into the whole sequence with some of them.

Each rank then attends as one process would, by the model's own function, and a second all-to-all turns the output back.
The pieces are contiguous, so after the exchange the whole sequence is in order. Query heads are parted in contiguous
runs, and key heads go where their queries are: where a key head's queries are on several ranks, it is sent to each of
them, and its gradients come back from each and are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def exchanged_kv_heads(kv_heads: int, ranks: int) -> int:
    """How many key heads are exchanged: the fewest copies that give each rank whole heads, equally many."""
    return math.lcm(kv_heads, ranks)


def attention(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    causal: bool,
    inner: Callable[..., Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    """What this rank's queries attend to in the whole sequence; `inner` is the attention of one process."""
    ranks, heads = group.size(), q_BHSD.shape[1]
    if heads % ranks:
        raise ValueError(
            f"Ulysses parts the heads of attention, and {heads} (on this rank, after tensor parallelism) are not "
            f"divisible by {ranks} ranks: choose a degree that divides them, or kind='ring'"
        )
    groups = exchanged_kv_heads(k_BGSD.shape[1], ranks)
    k, v = (x.repeat_interleave(groups // x.shape[1], dim=1).unsqueeze(2) for x in (k_BGSD, v_BGSD))
    mine_BGNSD = torch.cat([q_BHSD.unflatten(1, (groups, -1)), k, v], dim=2)
    mine_PBGNSD = mine_BGNSD.unflatten(1, (ranks, -1)).movedim(1, 0)  # by the rank that will hold these heads
    whole_PBGNSD = _Exchange.apply(mine_PBGNSD, group)  # by the rank that held this piece of the sequence
    whole_BGNSD = whole_PBGNSD.movedim(0, 3).flatten(3, 4)
    q, k, v = whole_BGNSD.split([whole_BGNSD.shape[2] - 2, 1, 1], dim=2)
    out_BHSD = inner(q.flatten(1, 2), k.squeeze(2), v.squeeze(2), causal=causal)
    out_PBHSD: Tensor = _Exchange.apply(out_BHSD.unflatten(2, (ranks, -1)).movedim(2, 0), group)
    return out_PBHSD.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts; it is its own inverse, and so its gradient's."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
