"""The cross-entropy of a head, in chunks of rows, so that the logits of a whole batch never exist.

For a vocabulary of 128k and 8k tokens the logits alone are 4 GiB in fp32; here a chunk of them lives at a time. The
backward pass computes each chunk's logits again: what is kept between is one number a row, its log-sum-exp. (Gradients
made at once in the forward pass would save that product, but would hold a gradient of the whole weight until then.)

With a `group` the vocabulary is split over its ranks in contiguous parts, and only three numbers a row are exchanged.
Products are made in the dtype of what is given; all that follows them, and all sums over chunks, in fp32 (or fp64).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # a target that does not count, as in PyTorch


def chunked_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets: Tensor,
    *,
    chunk: int = 1024,
    group: dist.ProcessGroup | None = None,
    first: int | None = None,
) -> Tensor:
    """The sum of the cross-entropies of `hidden @ weight.T + bias` at all targets that are not -100.

    `hidden` has one dimension more than `targets`. With a group, `weight` and `bias` are this rank's rows of the
    vocabulary, from row `first` on (without it: all ranks have equally many), and `hidden` and `targets` are the same
    on all. Every rank then returns the same loss and has the whole gradient of its own weight, but only its share of
    the gradient of `hidden`: the sum over the group is the gradient.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: a chunk has at least one row")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"each target needs its hidden state: hidden is {[*hidden.shape]}, targets {[*targets.shape]}")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # as a linear layer does
        dtype = torch.get_autocast_dtype(device)
        hidden, weight_VD = hidden.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    if first is None:
        first = 0 if group is None else group.rank() * weight_VD.shape[0]
    with torch.autocast(device, enabled=False):
        loss: Tensor = _Loss.apply(hidden.flatten(0, -2), weight_VD, bias_V, targets.flatten(), chunk, group, first)
    return loss


def traffic(rows: int, ranks: int, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Payload bytes by operation, forward and backward, for `rows` targets and a vocabulary split over `ranks`.

    Forward, for each chunk: an all-reduce of one number a row (the largest logit) and one of two (the sum of the
    exponentials, the target's logit), in fp32 or larger. Backward nothing; the caller's sum of the gradients of
    `hidden` is not counted here.
    """
    return ({"all_reduce": 3 * rows * max(element_size, 4)} if ranks > 1 else {}), {}


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        chunk: int,
        group: dist.ProcessGroup | None,
        first: int,
    ) -> Tensor:
        lse_N = hidden_ND.new_empty(len(targets_N), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        loss = lse_N.new_zeros(())
        for hidden, targets, lse in zip(*(x.split(chunk) for x in (hidden_ND, targets_N, lse_N)), strict=True):
            logits_CV = _logits(hidden, weight_VD, bias_V)
            places_C1, here_C1 = _places(targets, first, weight_VD.shape[0], group)
            largest_C = logits_CV.amax(1)
            if group is not None:
                dist.all_reduce(largest_C, dist.ReduceOp.MAX, group)
            at_target_C = logits_CV.gather(1, places_C1).where(here_C1, 0).squeeze(1)
            sums_2C = torch.stack([logits_CV.sub_(largest_C.unsqueeze(1)).exp_().sum(1), at_target_C])
            if group is not None:
                dist.all_reduce(sums_2C, dist.ReduceOp.SUM, group)
            torch.add(largest_C, sums_2C[0].log(), out=lse)
            loss += (lse - sums_2C[1]).where(targets != IGNORED, 0).sum()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, lse_N)
        ctx.chunk, ctx.group, ctx.first = chunk, group, first
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, lse_N = ctx.saved_tensors
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(x, dtype=lse_N.dtype if summed else None) if needed else None
            for x, needed, summed in zip(
                (hidden_ND, weight_VD, bias_V), ctx.needs_input_grad[:3], (False, True, True), strict=True
            )
        )
        starts = range(0, len(targets_N), ctx.chunk) if len(weight_VD) else ()
        for rows in (slice(start, start + ctx.chunk) for start in starts):
            hidden, targets = hidden_ND[rows], targets_N[rows]
            wrong_CV = _logits(hidden, weight_VD, bias_V).sub_(lse_N[rows].unsqueeze(1)).exp_()
            places_C1, here_C1 = _places(targets, ctx.first, weight_VD.shape[0], ctx.group)
            wrong_CV.scatter_add_(1, places_C1, -here_C1.to(wrong_CV.dtype))
            wrong_CV.mul_((targets != IGNORED).unsqueeze(1))
            if of_bias is not None:
                of_bias += wrong_CV.sum(0)
            wrong_CV = wrong_CV.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[rows] = (wrong_CV @ weight_VD) * grad
            if of_weight is not None:
                _add_product(of_weight, wrong_CV.T, hidden)
        if of_weight is not None:
            of_weight = of_weight.mul_(grad).to(weight_VD.dtype)
        if of_bias is not None:
            of_bias = of_bias.mul_(grad).to(bias_V.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """In fp32 or larger; where a rank has no row of the vocabulary, one of a probability of 0."""
    dtype = torch.promote_types(hidden_CD.dtype, torch.float32)
    if not len(weight_VD):
        return hidden_CD.new_full((len(hidden_CD), 1), -torch.inf, dtype=dtype)
    return F.linear(hidden_CD, weight_VD, bias_V).to(dtype)


def _places(targets_C: Tensor, first: int, rows: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Where among this rank's rows each target is, and whether it is there at all (else its place is 0)."""
    places_C1 = (targets_C - first).unsqueeze(1)
    here_C1 = targets_C.unsqueeze(1) != IGNORED
    if group is not None:  # without one a target beyond the vocabulary is an error, as in PyTorch
        here_C1 &= (places_C1 >= 0) & (places_C1 < rows)
    return places_C1.where(here_C1, 0), here_C1
