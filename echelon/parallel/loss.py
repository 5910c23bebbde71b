"""The cross-entropy of a head, in chunks of rows, so that the logits of a whole batch never exist.

For a vocabulary of 128k and 8k tokens the logits alone are 4 GiB in fp32; here a chunk of them lives at a time. While
it does, its gradients are made too, so that no logit is computed twice: what is kept for the backward pass are the
gradients of the hidden states and of the weight, which come first in it anyway. (A pipeline that ends many forward
passes before it begins a backward pass would hold one of the weight for each.)

With a `group` the vocabulary is split over its ranks in contiguous parts, and only three numbers a row are exchanged.
Products are made in the dtype of what is given, or in fp8; all that follows them, and all sums over chunks, in fp32 (or
fp64). On a GPU what happens between the products takes two kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.parallel import fp8

try:
    from echelon.parallel import kernels
except ImportError:  # PyTorch for CPUs comes without Triton
    kernels = None  # type: ignore[assignment]

IGNORED = -100  # a target that does not count, as in PyTorch
ABSENT = -1  # the place of a target that does not count, or is among another rank's rows


def chunked_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets: Tensor,
    *,
    chunk: int = 1024,
    group: dist.ProcessGroup | None = None,
    first: int | None = None,
    in_fp8: bool = False,
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
    hidden_ND, targets_N = hidden.flatten(0, -2), targets.flatten()
    if in_fp8:
        chunk = -(-chunk // fp8.MULTIPLE) * fp8.MULTIPLE
        hidden_ND, targets_N = _padded(hidden_ND, targets_N)
    with torch.autocast(device, enabled=False):
        loss: Tensor = _Loss.apply(
            hidden_ND, weight_VD, bias_V, targets_N, chunk, group, first, in_fp8, torch.is_grad_enabled()
        )
    return loss


def _padded(hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """With rows that do not count, so that there are as many as fp8 can multiply."""
    more = -len(targets_N) % fp8.MULTIPLE
    return F.pad(hidden_ND, (0, 0, 0, more)), F.pad(targets_N, (0, more), value=IGNORED)


def traffic(rows: int, ranks: int, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Payload bytes by operation, forward and backward, for `rows` targets and a vocabulary split over `ranks`.

    Forward, for each chunk: an all-reduce of one number a row (the largest log-sum-exp of a rank) and one of two (the
    sum of their exponentials, the target's logit), in fp32 or larger. Backward nothing; the caller's sum of the
    gradients of `hidden` is not counted here.
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
        in_fp8: bool,
        with_gradients: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        products = (_ProductsInFp8 if in_fp8 else _Products)(weight_VD, bias_V)
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(x, dtype=dtype) if with_gradients and needed and x is not None else None
            for x, needed, dtype in zip(
                (hidden_ND, weight_VD, bias_V), ctx.needs_input_grad, (hidden_ND.dtype, wide, wide), strict=False
            )
        )
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        for start in range(0, len(targets_N), chunk):
            rows = slice(start, start + chunk)
            places_C = _places(targets_N[rows], first, weight_VD.shape[0], group)
            logits_CV = products.logits(hidden_ND[rows])
            lse_C, at_target_C = _statistics(logits_CV, places_C)
            if group is not None:
                lse_C, at_target_C = _over_ranks(lse_C, at_target_C, group)
            counts_C = targets_N[rows] != IGNORED
            loss += (lse_C - at_target_C).where(counts_C, 0).sum()
            if not len(weight_VD) or (of_hidden is None and of_weight is None and of_bias is None):
                continue
            products.take(logits_CV, lse_C.where(counts_C, torch.inf), places_C)
            if of_hidden is not None:
                of_hidden[rows] = products.of_hidden()
            if of_weight is not None:
                products.add_of_weight(of_weight)
            if of_bias is not None:
                products.add_of_bias(of_bias)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtype = weight_VD.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if each is None else torch.mul(each, grad, out=torch.empty_like(each, dtype=ctx.dtype))
            for each in ctx.saved_tensors
        )
        return *scaled, None, None, None, None, None, None


class _Products:
    """The products of a chunk with the weight, in the dtype of both."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None) -> None:
        self.weight_VD, self.bias_V = weight_VD, bias_V

    def logits(self, hidden_CD: Tensor) -> Tensor:
        self.hidden_CD = hidden_CD
        return F.linear(hidden_CD, self.weight_VD, self.bias_V)

    def take(self, logits_CV: Tensor, lse_C: Tensor, places_C: Tensor) -> None:
        """The gradient of the logits: by how much each probability is wrong."""
        if _kernels_for(logits_CV):
            self.wrong_CV = kernels.wrong(logits_CV, lse_C, places_C, out_CV=logits_CV)
        else:
            self.wrong_CV = _wrong(logits_CV, lse_C, places_C)

    def of_hidden(self) -> Tensor:
        return self.wrong_CV @ self.weight_VD

    def add_of_weight(self, total_VD: Tensor) -> None:
        if total_VD.dtype == self.wrong_CV.dtype:
            total_VD.addmm_(self.wrong_CV.T, self.hidden_CD)
        else:
            total_VD += self.wrong_CV.T @ self.hidden_CD

    def add_of_bias(self, total_V: Tensor) -> None:
        total_V += self.wrong_CV.sum(0, dtype=total_V.dtype)


class _ProductsInFp8:
    """The same in 8 bits. What is wrong lies between -1 and 1, so that its scale is known."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None) -> None:
        self.weight, self.bias_V, self.dtype = fp8.factor(weight_VD, fp8.VALUES), bias_V, weight_VD.dtype
        self.scale = torch.full((), 1 / fp8.RANGE, device=weight_VD.device)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        self.hidden = fp8.factor(hidden_CD, fp8.VALUES)
        return fp8.multiply(self.hidden, self.weight, self.dtype, self.bias_V, fast=True)

    def take(self, logits_CV: Tensor, lse_C: Tensor, places_C: Tensor) -> None:
        if _kernels_for(logits_CV):
            wrong_CV = torch.empty_like(logits_CV, dtype=fp8.GRADIENTS)
            kernels.wrong(logits_CV, lse_C, places_C, out_CV=wrong_CV, factor=fp8.RANGE)
        else:
            wrong_CV = (_wrong(logits_CV, lse_C, places_C) * fp8.RANGE).to(fp8.GRADIENTS)
        self.wrong = fp8.both(wrong_CV, self.scale)

    def of_hidden(self) -> Tensor:
        return fp8.multiply(self.wrong, self.weight.turned, self.dtype)

    def add_of_weight(self, total_VD: Tensor) -> None:
        total_VD += fp8.multiply(self.wrong.turned, self.hidden.turned, self.dtype)

    def add_of_bias(self, total_V: Tensor) -> None:
        total_V += self.wrong.plain_MN.to(total_V.dtype).sum(0) * self.scale


def _kernels_for(logits_CV: Tensor) -> bool:
    return kernels is not None and logits_CV.is_cuda and logits_CV.dtype != torch.float64


def _places(targets_C: Tensor, first: int, rows: int, group: dist.ProcessGroup | None) -> Tensor:
    """Where among this rank's rows each target is, if it is there at all."""
    places_C = targets_C - first
    here_C = targets_C != IGNORED
    if group is not None:  # without one a target beyond the vocabulary is an error, as in PyTorch
        here_C &= (places_C >= 0) & (places_C < rows)
    return places_C.where(here_C, ABSENT)


def _statistics(logits_CV: Tensor, places_C: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's log-sum-exp, and the logit of its target, or 0."""
    if _kernels_for(logits_CV):
        return kernels.statistics(logits_CV, places_C)
    wide = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if not logits_CV.shape[1]:  # a rank may have no row of the vocabulary
        return wide.new_full((len(wide),), -torch.inf), wide.new_zeros(len(wide))
    here_C = places_C != ABSENT
    return wide.logsumexp(1), wide.gather(1, places_C.where(here_C, 0).unsqueeze(1)).squeeze(1).where(here_C, 0)


def _over_ranks(lse_C: Tensor, at_target_C: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The same for the whole vocabulary."""
    dist.all_reduce(largest_C := lse_C.clone(), dist.ReduceOp.MAX, group)
    sums_2C = torch.stack([(lse_C - largest_C).exp(), at_target_C])
    dist.all_reduce(sums_2C, dist.ReduceOp.SUM, group)
    return largest_C + sums_2C[0].log(), sums_2C[1]


def _wrong(logits_CV: Tensor, lse_C: Tensor, places_C: Tensor) -> Tensor:
    wrong_CV = (logits_CV - lse_C.unsqueeze(1)).exp_()
    here_C1 = (places_C != ABSENT).unsqueeze(1)
    wrong_CV.scatter_add_(1, places_C.unsqueeze(1).where(here_C1, 0), -here_C1.to(wrong_CV.dtype))
    return wrong_CV.to(logits_CV.dtype)
