"""Attention of a block of queries to a block of keys, with what is needed to join blocks: the log-sum-exp of each row.

Shapes: B batch, H query heads, G key and value heads (query head h uses h // (H / G)), S queries, T keys, D the size of
a head. Blocks of low precision accumulate in fp32; whatever is joined or summed over blocks stays in `accumulate`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are held in."""
    return torch.promote_types(dtype, torch.float32)


def forward(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The block's output and the log-sum-exp of its scores, (B, H, S). `causal`: no query sees a later key."""
    scores_BGNT = _scores(q_BHSD, k_BGTD, causal)
    lse_BGN1 = scores_BGNT.logsumexp(-1, keepdim=True)
    out_BGND = (scores_BGNT - lse_BGN1).exp() @ v_BGTD.to(scores_BGNT.dtype)
    return out_BGND.view(q_BHSD.shape), lse_BGN1.view(q_BHSD.shape[:-1])


def backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of q, k and v, where `out` and `lse` are those of all blocks together."""
    scores_BGNT = _scores(q_BHSD, k_BGTD, causal)
    q, k, v, grad, out = (
        _rows(x, k_BGTD.shape[1]).to(scores_BGNT.dtype) for x in (q_BHSD, k_BGTD, v_BGTD, grad_BHSD, out_BHSD)
    )
    weights_BGNT = (scores_BGNT - _rows(lse_BHS.unsqueeze(-1), k.shape[1])).exp()
    delta_BGN1 = (grad * out).sum(-1, keepdim=True)
    scores_grad_BGNT = weights_BGNT * (grad @ v.mT - delta_BGN1) * q.shape[-1] ** -0.5
    return (scores_grad_BGNT @ k).view(q_BHSD.shape), scores_grad_BGNT.mT @ q, weights_BGNT.mT @ grad


def join(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of the same queries over the keys of both."""
    joined = torch.logaddexp(lse, block_lse)
    return (
        out * (lse - joined).exp().unsqueeze(-1) + block_out * (block_lse - joined).exp().unsqueeze(-1),
        joined,
    )


def _rows(x_BHSD: Tensor, groups: int) -> Tensor:
    """The queries of all heads that share a key head, as rows of one matrix: (B, G, N, D) with N = H / G * S."""
    return x_BHSD.reshape(x_BHSD.shape[0], groups, -1, x_BHSD.shape[-1])


def _scores(q_BHSD: Tensor, k_BGTD: Tensor, causal: bool) -> Tensor:
    dtype = accumulate(q_BHSD.dtype)
    scores_BGNT: Tensor = _rows(q_BHSD, k_BGTD.shape[1]).to(dtype) @ k_BGTD.mT.to(dtype) * q_BHSD.shape[-1] ** -0.5
    if causal:
        length = q_BHSD.shape[2]
        hidden_ST = torch.ones(length, length, dtype=torch.bool, device=q_BHSD.device).triu(1)
        scores_BGNT.unflatten(2, (-1, length)).masked_fill_(hidden_ST, -torch.inf)
    return scores_BGNT
