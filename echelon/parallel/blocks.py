"""Attention of a block of queries to a block of keys, with what is needed to join blocks: the log-sum-exp of each row.

Shapes: B batch, H query heads, G key and value heads (query head h uses h // (H / G)), S queries, T keys, D the size of
a head. `forward` and `backward` call the kernels of PyTorch that `F.scaled_dot_product_attention` calls, for only they
return and take the log-sum-exp; where none takes such tensors, a few plain operations do the same in fp32 or larger.
`torch.nn.attention.sdpa_kernel` chooses here, too.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["cpu", "flash", "efficient", "plain"]
_LOW = (torch.bfloat16, torch.float16)
_ALIGNED = 32  # rows: to a multiple of it the efficient kernel pads its log-sum-exp


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are held in."""
    return torch.promote_types(dtype, torch.float32)


def kernel(q_BHSD: Tensor) -> Kernel:
    """Which of PyTorch's kernels takes such tensors."""
    head_dim, dtype = q_BHSD.shape[-1], q_BHSD.dtype
    if q_BHSD.is_cpu and torch.backends.cuda.flash_sdp_enabled():
        return "cpu"
    if q_BHSD.is_cuda and torch.version.cuda and torch.cuda.get_device_capability(q_BHSD.device) >= (8, 0):
        if dtype in _LOW and head_dim % 8 == 0 and head_dim <= 256 and torch.backends.cuda.flash_sdp_enabled():
            return "flash"
        if dtype == torch.float32 and head_dim % 4 == 0 and torch.backends.cuda.mem_efficient_sdp_enabled():
            return "efficient"
    return "plain"


def forward(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The block's output and the log-sum-exp of its scores, (B, H, S). `causal`: no query sees a later key."""
    aten, qkv = torch.ops.aten, (q_BHSD, k_BGTD, v_BGTD)
    match kernel(q_BHSD):
        case "cpu":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, causal)
        case "flash":
            out, lse, *_ = aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal)
        case "efficient":
            k, v = (_for_each_query(x, q_BHSD.shape[1]) for x in (k_BGTD, v_BGTD))
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(q_BHSD, k, v, None, True, 0.0, causal)
            lse = lse[..., : q_BHSD.shape[2]]
        case "plain":
            return plain_forward(*qkv, causal=causal)
    return out, lse


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
    aten, heads, length = torch.ops.aten, q_BHSD.shape[1], q_BHSD.shape[2]
    match kernel(q_BHSD):
        case "cpu":
            qkv_out = q_BHSD, k_BGTD, v_BGTD, out_BHSD
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_BHSD, *qkv_out, lse_BHS.contiguous(), 0.0, causal
            )
        case "flash":
            qkv_out = q_BHSD, k_BGTD, v_BGTD, out_BHSD
            no_dropout = torch.empty(2, dtype=torch.uint64, device=q_BHSD.device)
            grads = aten._scaled_dot_product_flash_attention_backward(
                *(grad_BHSD, *qkv_out, lse_BHS.contiguous()),
                *(None, None, length, k_BGTD.shape[2], 0.0, causal, no_dropout, no_dropout),
            )
        case "efficient":
            qkv_out = q_BHSD, _for_each_query(k_BGTD, heads), _for_each_query(v_BGTD, heads), out_BHSD
            aligned_lse = F.pad(lse_BHS, (0, -length % _ALIGNED), value=torch.inf)
            no_dropout = torch.empty((), dtype=torch.int64, device=q_BHSD.device)
            q_grad, *kv_grads, _ = aten._scaled_dot_product_efficient_attention_backward(
                *(grad_BHSD, *qkv_out[:3], None, out_BHSD, aligned_lse, no_dropout, no_dropout),
                *(0.0, [True, True, True, False], causal),
            )
            grads = q_grad, *(x.unflatten(1, (k_BGTD.shape[1], -1)).sum(2) for x in kv_grads)
        case "plain":
            return plain_backward(grad_BHSD, q_BHSD, out_BHSD, lse_BHS, k_BGTD, v_BGTD, causal=causal)
    q_grad, k_grad, v_grad = grads
    return q_grad, k_grad, v_grad


def join(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of the same queries over the keys of both."""
    joined = torch.logaddexp(lse, block_lse)
    return (
        out * (lse - joined).exp().unsqueeze(-1) + block_out * (block_lse - joined).exp().unsqueeze(-1),
        joined,
    )


def plain_forward(q_BHSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """What `forward` does, for tensors of any kind."""
    scores_BGNT = _scores(q_BHSD, k_BGTD, causal)
    lse_BGN1 = scores_BGNT.logsumexp(-1, keepdim=True)
    out_BGND = (scores_BGNT - lse_BGN1).exp() @ v_BGTD.to(scores_BGNT.dtype)
    return out_BGND.view(q_BHSD.shape), lse_BGN1.view(q_BHSD.shape[:-1])


def plain_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `backward` does, for tensors of any kind."""
    scores_BGNT = _scores(q_BHSD, k_BGTD, causal)
    q, k, v, grad, out = (
        _rows(x, k_BGTD.shape[1]).to(scores_BGNT.dtype) for x in (q_BHSD, k_BGTD, v_BGTD, grad_BHSD, out_BHSD)
    )
    weights_BGNT = (scores_BGNT - _rows(lse_BHS.unsqueeze(-1), k.shape[1])).exp()
    delta_BGN1 = (grad * out).sum(-1, keepdim=True)
    scores_grad_BGNT = weights_BGNT * (grad @ v.mT - delta_BGN1) * q.shape[-1] ** -0.5
    return (scores_grad_BGNT @ k).view(q_BHSD.shape), scores_grad_BGNT.mT @ q, weights_BGNT.mT @ grad


def _for_each_query(x_BGTD: Tensor, heads: int) -> Tensor:
    return x_BGTD.repeat_interleave(heads // x_BGTD.shape[1], dim=1)


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
