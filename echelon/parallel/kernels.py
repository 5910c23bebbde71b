"""Triton kernels, for GPUs: what happens to logits between the products of the loss, and what makes 8-bit factors.

Written by hand because PyTorch and its compiler do each of these in several passes, or slowly (what is transposed above
all), and they are most of the memory that moves in a small model. Nothing is added up in an order that could change: a
step gives the same bits each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOWEST = tl.constexpr(-1e30)  # below any logit, and yet finite: differences are never of two infinities
_BLOCK = 2048
_PLAIN, _GELU, _GELU_BACKWARD = 0, 1, 2  # what is cast


def statistics(logits_CV: Tensor, places_C: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's log-sum-exp, and the logit at its place: 0 at place -1, not a number at other places outside."""
    lse_C, at_place_C = torch.empty(2, len(logits_CV), device=logits_CV.device)
    rows, columns = logits_CV.shape
    _statistics[(rows,)](logits_CV, places_C, lse_C, at_place_C, columns, _BLOCK, num_warps=8)
    return lse_C, at_place_C


def wrong(logits_CV: Tensor, lse_C: Tensor, places_C: Tensor, out_CV: Tensor, factor: float = 1.0) -> Tensor:
    """exp(logits - lse), less 1 at each row's place, times `factor`; `out` may be the logits."""
    rows, columns = logits_CV.shape
    grid = (rows * triton.cdiv(columns, _BLOCK),)
    _wrong[grid](logits_CV, lse_C, places_C, out_CV, columns, factor, _BLOCK, num_warps=4)
    return out_CV


def cast(x_MN: Tensor, scale: Tensor, dtype: torch.dtype, *, gelu: bool = False) -> Tensor:
    """x, or its GELU, over `scale` in 8 bits."""
    return _cast(x_MN, x_MN, scale, dtype, _GELU if gelu else _PLAIN)


def cast_gelu_backward(grad_MN: Tensor, x_MN: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of what the GELU was taken of, in the same way."""
    return _cast(x_MN, grad_MN, scale, dtype, _GELU_BACKWARD)


def _cast(x_MN: Tensor, grad_MN: Tensor, scale: Tensor, dtype: torch.dtype, kind: int) -> Tensor:
    out_MN = torch.empty_like(x_MN, dtype=dtype)
    count, largest = x_MN.numel(), torch.finfo(dtype).max
    grid = (triton.cdiv(count, _BLOCK),)
    _cast_block[grid](x_MN, grad_MN, scale, out_MN, count, largest, kind, _BLOCK, num_warps=4)
    return out_MN


def transpose(x_MN: Tensor) -> Tensor:
    """Of 8 bits each."""
    rows, columns = x_MN.shape
    out_NM = x_MN.new_empty(columns, rows)
    grid = (triton.cdiv(columns, 128), triton.cdiv(rows, 128))
    _transpose[grid](x_MN.view(torch.uint8), out_NM.view(torch.uint8), rows, columns, 128, num_warps=8)
    return out_NM


def sum_rows(x_MN: Tensor) -> Tensor:
    """Of 8 bits each, in fp32."""
    rows, columns = x_MN.shape
    sums_M = torch.empty(rows, device=x_MN.device)
    _sum_rows[(rows,)](x_MN, sums_M, columns, 4096, num_warps=8)
    return sums_M


@triton.jit
def _statistics(logits, places, lse, at_place, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    largest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(logits + place, place < columns, -float("inf")).to(tl.float32)
        smaller = tl.exp(-tl.abs(x - largest))  # of the two that a running sum needs, the exponential that is not 1
        total = tl.where(x > largest, total * smaller + 1, total + smaller)
        largest = tl.maximum(largest, x)
    of_row = tl.max(largest)
    tl.store(lse + row, of_row + tl.log(tl.sum(total * tl.exp(largest - of_row))))
    place = tl.load(places + row)
    inside = (place >= 0) & (place < columns)
    found = tl.load(logits + place, inside, 0.0).to(tl.float32)
    tl.store(at_place + row, tl.where(inside, found, tl.where(place == -1, 0.0, float("nan"))))


@triton.jit
def _wrong(logits, lse, places, out, columns, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * columns + column, column < columns, 0.0).to(tl.float32)
    x = tl.exp(x - tl.load(lse + row)) - tl.where(column == tl.load(places + row), 1.0, 0.0)
    tl.store(out + row * columns + column, (x * FACTOR).to(out.dtype.element_ty), column < columns)


@triton.jit
def _cast_block(  # type: ignore[no-untyped-def]
    x, grad, scale, out, count, LARGEST: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, place < count, 0.0).to(tl.float32)
    if KIND != 0:  # PyTorch's GELU by a tanh, in another form
        share = tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
        if KIND == 1:
            value *= share
        else:
            slope = 1.5957691216057308 * (1 + 3 * 0.044715 * value * value)
            of_value = share + value * share * (1 - share) * slope
            value = tl.load(grad + place, place < count, 0.0).to(tl.float32) * of_value
    value = tl.clamp(value / tl.load(scale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + place, value.to(out.dtype.element_ty), place < count)


@triton.jit
def _transpose(x, out, rows, columns, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(1) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    column = (tl.program_id(0) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    tile = tl.load(x + row[:, None] * columns + column, (row[:, None] < rows) & (column < columns), 0)
    tl.store(out + column[:, None] * rows + row, tl.trans(tile), (column[:, None] < columns) & (row < rows))


@triton.jit
def _sum_rows(x, sums, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * columns + place, place < columns, 0.0).to(tl.float32)
    tl.store(sums + row, tl.sum(total))
