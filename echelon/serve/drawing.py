"""Triton kernels that draw the next tokens, in the way that sample.py tells: what it does to whole rows of logits, one
operation after the other, in three kernels.

    limit     which tokens min-p, top-k and top-p leave: from which logit on
    draw      of those the next ones, with chance and without, in blocks of a row; `best` of all blocks

Nothing is sorted. The logit from which on tokens are left is sought by halving, with a look at the whole row each time.
Floats are in the order of whole numbers, of which two bytes have 65,536: so 16 looks are enough, and 32 for four bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def limit(
    logits_RV: Tensor, temperatures_R: Tensor, min_p_R: Tensor, top_p_R: Tensor, top_k_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each row the least logit that may be drawn; and of those that equal it, the place of the last one that may."""
    rows, columns = logits_RV.shape
    lowest_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    last_R = torch.empty(rows, dtype=torch.int32, device=logits_RV.device)
    zeros = {torch.bfloat16: 16, torch.float16: 13}.get(logits_RV.dtype, 0)  # bits that are never set, of 32
    block = min(triton.next_power_of_2(columns), 8192)
    _limit[(rows,)](
        logits_RV, temperatures_R, min_p_R, top_p_R, top_k_R, lowest_R, last_R, columns, zeros, block, num_warps=16
    )
    return lowest_R, last_R


def draw(
    logits_RV: Tensor,
    temperatures_R: Tensor,
    keys_2R: Tensor,
    places_R: Tensor,
    limits: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """A token for each row: the likeliest where the temperature is 0, else by chance, as sample.py draws it; of those
    that `limit` leaves.
    """
    rows, columns = logits_RV.shape
    block = 8192
    blocks = triton.cdiv(columns, block)
    best_RB = torch.empty(rows, blocks, dtype=torch.float32, device=logits_RV.device)
    where_RB = torch.empty(rows, blocks, dtype=torch.int32, device=logits_RV.device)
    chosen_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    lowest_R, last_R = (temperatures_R, places_R) if limits is None else limits
    _draw[(rows, blocks)](
        logits_RV, temperatures_R, keys_2R, places_R, lowest_R, last_R, best_RB, where_RB, keys_2R.stride(0), columns,
        blocks, limits is not None, block, num_warps=8,
    )  # fmt: skip
    _best[(rows,)](best_RB, where_RB, chosen_R, blocks, triton.next_power_of_2(blocks), num_warps=1)
    return chosen_R


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """As `counter.mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _as_whole(x):  # type: ignore[no-untyped-def]
    """A float as a whole number, in the same order; what is no number is the least of all."""
    bits = tl.where(x >= -float("inf"), x, -float("inf")).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _as_float(whole):  # type: ignore[no-untyped-def]
    return tl.where(whole < 0, -whole | -0x80000000, whole).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, largest, scale):  # type: ignore[no-untyped-def]
    """The probability, of the largest logit's."""
    return tl.where(x == largest, 1.0, tl.exp2((x - largest) * scale))


@triton.jit
def _from(  # type: ignore[no-untyped-def]
    logits, columns, least, largest, scale, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    """How many logits of a row are as large as `least` (a whole number), or their weights together."""
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + column, column < columns, -float("inf")).to(tl.float32)
        part = _weight(x, largest, scale) if WEIGHTS else 1.0
        total += tl.where((_as_whole(x) >= least) & (column < columns), part, 0.0)
    return tl.sum(total)


@triton.jit
def _seek(  # type: ignore[no-untyped-def]
    logits, columns, low, high, wanted, largest, scale, ZEROS: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest whole number from which on there is as much as is wanted, or `low`; all without their zeros."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        is_enough = _from(logits, columns, middle << ZEROS, largest, scale, WEIGHTS, BLOCK) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@triton.jit(do_not_specialize_on_alignment=["temperatures", "min_ps", "top_ps", "top_ks"])
def _limit(  # type: ignore[no-untyped-def]
    logits, temperatures, min_ps, top_ps, top_ks, lowest, last, columns, ZEROS: tl.constexpr, BLOCK: tl.constexpr
):
    """First what min-p leaves, then top-k of that, then top-p of that. Of equal logits the first ones stay."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * columns
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    low = -0x7F800000 >> ZEROS
    equal = 2147483647.0  # of those that equal the least, how many stay
    place = 2147483647
    if (temperature > 0) & ((min_p > 0) | (top_p < 1) | (top_k > 0)):
        largest = -float("inf")
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(logits + column, column < columns, -float("inf")).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.where(x >= -float("inf"), x, -float("inf"))))
        high = _as_whole(largest) >> ZEROS
        scale = 1.4426950408889634 / temperature
        if min_p > 0:
            low = -(-_as_whole(largest + temperature * tl.log(min_p)) >> ZEROS)
        if (top_k > 0) & (top_k < columns):
            low = _seek(logits, columns, low, high, top_k, largest, scale, ZEROS, False, BLOCK)
            equal = top_k - _from(logits, columns, (low + 1) << ZEROS, largest, scale, False, BLOCK)
        if top_p < 1:
            more = _from(logits, columns, (low + 1) << ZEROS, largest, scale, True, BLOCK)
            there = _from(logits, columns, low << ZEROS, largest, scale, False, BLOCK)
            there -= _from(logits, columns, (low + 1) << ZEROS, largest, scale, False, BLOCK)
            of_least = _weight(_as_float(low << ZEROS), largest, scale)
            wanted = top_p * (more + tl.minimum(there, equal) * of_least)
            found = _seek(logits, columns, low, high, wanted, largest, scale, ZEROS, True, BLOCK)
            more = _from(logits, columns, (found + 1) << ZEROS, largest, scale, True, BLOCK)
            of_least = _weight(_as_float(found << ZEROS), largest, scale)
            equal = tl.where(of_least > 0, tl.maximum(tl.ceil((wanted - more) / of_least), 1.0), equal)
            low = found
        if equal < columns:
            seen = 0.0
            for begin in range(0, columns, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                x = tl.load(logits + column, column < columns, -float("inf")).to(tl.float32)
                is_equal = ((_as_whole(x) == low << ZEROS) & (column < columns)).to(tl.float32)
                here = tl.sum(is_equal)
                if (seen < equal) & (seen + here >= equal):
                    is_last = (is_equal > 0) & (seen + tl.cumsum(is_equal) == equal)
                    place = tl.sum(tl.where(is_last, column, 0))
                seen += here
    tl.store(lowest + row, _as_float(low << ZEROS))
    tl.store(last + row, place)


@triton.jit(
    do_not_specialize=["keys_stride"],
    do_not_specialize_on_alignment=["temperatures", "keys", "places", "lowest", "last"],
)
def _draw(  # type: ignore[no-untyped-def]
    logits, temperatures, keys, places, lowest, last, best, where, keys_stride, columns, blocks,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * columns + column, column < columns, -float("inf")).to(tl.float32)
    if LIMITED:
        least = tl.load(lowest + row)
        x = tl.where((x > least) | ((x == least) & (column <= tl.load(last + row))), x, -float("inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        of_row = _mix(tl.load(places + row).to(tl.uint32) ^ tl.load(keys + row).to(tl.uint32))
        hashed = _mix(of_row ^ _mix(column.to(tl.uint32) ^ tl.load(keys + keys_stride + row).to(tl.uint32)))
        between_0_and_1 = ((hashed >> 9).to(tl.float32) + 0.5) / 8388608
        x = x / temperature - tl.log(-tl.log(between_0_and_1))
    x = tl.where(x >= -float("inf"), x, -float("inf"))  # no number is drawn last, and never a token that does not exist
    largest = tl.max(x)
    tl.store(best + row * blocks + block, largest)
    tl.store(where + row * blocks + block, tl.min(tl.where((x == largest) & (column < columns), column, 2147483647)))


@triton.jit
def _best(best, where, chosen, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(best + row * blocks + block, block < blocks, -float("inf"))
    place = tl.load(where + row * blocks + block, block < blocks, 2147483647)
    tl.store(chosen + row, tl.min(tl.where(x == tl.max(x), place, 2147483647)).to(tl.int64))
