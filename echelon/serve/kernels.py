"""Triton kernels for a step of serving: what lies between the matrix products, and attention over pages.

A step that writes tokens is bound by the bytes it reads: weights once, and the keys and values of every sequence once.
So nothing between the products may read or write more than it must, and there may be few kernels, since each costs
microseconds whatever it does:

    norm      the stream's sum with what the last part added, and its norm: one pass
    enter     from the product `qkv`: the norms of queries and keys, their rotation, and the way into the cache
    attend    queries over pages; `merge` where the keys of a sequence are read in pieces
    gated     SwiGLU's activation
    in_8_bits what fp8 products are made of: each row's largest value, and the row over it
    thin      the product of few rows with a weight in 8 bits, which is read as it is; `widen` for many rows

Those that draw the next tokens are in drawing.py.

What lies in a packet (see fused.py) may lie anywhere in it, and so may the second of two tensors that are made as one:
kernels are not compiled anew for where it does.

All sums are in fp32, in an order that a step's shapes and lengths alone decide. `attend` serves prompts and answers
alike: a program has a tile of queries of one sequence with all heads that share a key, so that each key is read once
for all of them. The keys of an answer may be read in pieces, each by another program.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALLEST = tl.constexpr(2.0**-94)  # as in narrow.py
_LOWEST = tl.constexpr(-1e30)  # below any score, and yet finite: differences are never of two infinities


def norm(
    stream_TD: Tensor, added_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, eps: float, *, centred: bool
) -> Tensor:
    """Add to the stream, in place, and return the sum's norm: LayerNorm if `centred`, else RMSNorm."""
    out_TD = torch.empty_like(stream_TD)
    rows, dim = stream_TD.shape
    added, bias = stream_TD if added_TD is None else added_TD, weight_D if bias_D is None else bias_D
    has = added_TD is not None, bias_D is not None
    block = triton.next_power_of_2(dim)
    _norm[(rows,)](
        stream_TD, added, weight_D, bias, out_TD, dim, eps, *has, centred, block, num_warps=min(max(block // 512, 1), 8)
    )
    return out_TD


def enter(
    qkv_TE: Tensor,
    turns_LD: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
    rows_T: Tensor,
    positions_T: Tensor,
    table_RP: Tensor,
    keys_PSGD: Tensor,
    values_PSGD: Tensor,
) -> Tensor:
    """The queries, normed and rotated; keys and values go to their places in the cache.

    `turns` has the cosines, then the sines, of half a head's features at each position; `norms` the weights of queries'
    and keys' norms, and their epsilon. What is not finite becomes 0 in the cache (see attention.py).
    """
    _, page_size, heads, dim = keys_PSGD.shape
    tokens = len(qkv_TE)
    shared = qkv_TE.shape[1] // (heads * dim) - 2
    q_THD = qkv_TE.new_empty(tokens, heads * shared, dim)
    q_norm, k_norm, eps = norms or (qkv_TE, qkv_TE, 0.0)
    _enter[(tokens, heads)](
        qkv_TE, qkv_TE if turns_LD is None else turns_LD, q_norm, k_norm, rows_T, positions_T, table_RP, q_THD,
        keys_PSGD, values_PSGD, eps, table_RP.stride(0), heads, shared, dim, page_size, turns_LD is not None,
        norms is not None, triton.next_power_of_2(shared + 2), triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip
    return q_THD


def attend(
    q_THD: Tensor,
    tiles_X5: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    table_RP: Tensor,
    keys_PSGD: Tensor,
    values_PSGD: Tensor,
    out_THD: Tensor,
    *,
    queries: int,
    joins_J3: Tensor | None = None,
) -> None:
    """X tiles of at most `queries` tokens, each of one sequence. Of a tile are told: its first token; how many it has,
    of which 0 is no tile at all; the piece of its keys that shall be read, and of how many; and from where on, among X
    places, there is room for what comes of all its pieces. These are put together again: of a join are told the token,
    how many pieces there are, of which 0 is no join at all, and their room. Without joins nothing is in pieces.
    """
    _, page_size, heads, dim = keys_PSGD.shape
    shared = q_THD.shape[1] // heads
    rows = max(triton.next_power_of_2(queries * shared), 16)
    padded = max(triton.next_power_of_2(dim), 16)
    wide = q_THD.dtype == torch.float32
    keys, stages = _keys_and_stages(keys_PSGD, rows, padded)
    parts = largest = total = out_THD
    if joins_J3 is not None:
        parts = out_THD.new_empty(len(tiles_X5), q_THD.shape[1], dim, dtype=torch.float32)
        largest, total = out_THD.new_empty(2, len(tiles_X5), q_THD.shape[1], dtype=torch.float32)
    _attend[(heads * len(tiles_X5),)](
        q_THD, tiles_X5, rows_T, positions_T, table_RP, keys_PSGD, values_PSGD, out_THD, parts, largest, total,
        math.log2(math.e) / math.sqrt(dim), table_RP.stride(0), heads, shared, dim, page_size, joins_J3 is not None,
        rows, keys, padded, "ieee" if wide else "tf32", num_warps=4 if rows <= 64 else 8, num_stages=stages,
    )  # fmt: skip
    if joins_J3 is not None:
        _merge[(q_THD.shape[1] * len(joins_J3),)](
            joins_J3, parts, largest, total, out_THD, q_THD.shape[1], dim, triton.next_power_of_2(dim), num_warps=1
        )


def _keys_and_stages(keys_PSGD: Tensor, rows: int, padded: int) -> tuple[int, int]:
    """How many keys a program takes at once, and how many such loads are under way: what a processor's memory holds."""
    element = keys_PSGD.element_size()
    most = _shared_memory(keys_PSGD.device) - rows * padded * element
    keys, stages = (32, 2) if element == 4 else (128 if rows <= 16 else 64, 3)
    while 2 * keys * padded * element * stages > most and keys > 16:
        keys, stages = (keys, stages - 1) if stages > 2 else (keys // 2, stages)
    return keys, stages


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have of it."""
    if device.type != "cuda":
        return 2**18  # the interpreter does not mind
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


def gated(both_TF: Tensor) -> Tensor:
    """SiLU of the first half of each row, times the second."""
    tokens, width = both_TF.shape[0], both_TF.shape[1] // 2
    out_TF = both_TF.new_empty(tokens, width)
    block = 1024
    _gated[(tokens, triton.cdiv(width, block))](both_TF, out_TF, width, block, num_warps=4)
    return out_TF


def in_8_bits(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in e4m3 over its own scale, and the scales (fp32)."""
    x_MK = x_MK.contiguous()
    rows, columns = x_MK.shape
    out_MK = torch.empty_like(x_MK, dtype=torch.float8_e4m3fn)
    scale_M1 = torch.empty(rows, 1, dtype=torch.float32, device=x_MK.device)
    block = triton.next_power_of_2(columns)
    _in_8_bits[(rows,)](x_MK, out_MK, scale_M1, columns, block, num_warps=min(max(block // 512, 1), 16))
    return out_MK, scale_M1


def thin(
    rows_MK: Tensor,
    row_scale_M1: Tensor | None,
    weight_NK: Tensor,
    scale_N1: Tensor,
    bias_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product of rows, in 8-bit floats with scales or as they are, with a weight in 8-bit floats or integers.

    A program has 64 or 32 rows of the weight; where these are too few programs for all processors, the sum is split
    over several, of which the last to end adds up all parts.
    """
    rows_MK = rows_MK.contiguous()
    (count, inner), columns = rows_MK.shape, len(weight_NK)
    rows = min(max(triton.next_power_of_2(count), 16), 64)
    block, step = (64, 256) if row_scale_M1 is not None else (32, 256) if rows == 16 else (64, 128)
    blocks = triton.cdiv(columns, block)
    tiles = triton.cdiv(count, rows)
    splits = 1 << min(max(3 * processors(rows_MK.device) // (blocks * tiles), 1).bit_length() - 1, 3)
    room = step * (block + rows * rows_MK.element_size())
    stages = max(min(_shared_memory(rows_MK.device) // room, 4), 1)
    out_MN = torch.empty(count, columns, dtype=dtype, device=rows_MK.device)
    parts = counts = out_MN
    if splits > 1:
        parts = torch.empty(tiles, blocks, splits, block * rows, dtype=torch.float32, device=rows_MK.device)
        counts = _counts(rows_MK.device)
    _thin[(blocks, tiles, splits)](
        rows_MK, scale_N1 if row_scale_M1 is None else row_scale_M1, weight_NK, scale_N1,
        scale_N1 if bias_N is None else bias_N, out_MN, parts, counts, count, columns, inner, row_scale_M1 is not None,
        bias_N is not None, splits, rows, block, step, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out_MN


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _counts(device: torch.device) -> Tensor:
    """Of programs that have ended, by tile: zeros, before each product and after it."""
    return torch.zeros(3 * processors(device), dtype=torch.int32, device=device)


def widen(weight_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    out_NK = torch.empty_like(weight_NK, dtype=dtype)
    columns, block = weight_NK.shape[1], 4096
    _widen[(len(weight_NK), triton.cdiv(columns, block))](weight_NK, scale_N1, out_NK, columns, block, num_warps=8)
    return out_NK


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    stream, added, weight, bias, out, dim, eps,
    ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK)
    inside = place < dim
    row = tl.program_id(0).to(tl.int64) * dim + place
    x = tl.load(stream + row, inside, 0.0)
    if ADDS:
        x += tl.load(added + row, inside, 0.0)
        tl.store(stream + row, x, inside)
    x = x.to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x) / dim, 0.0)
    x *= tl.rsqrt(tl.sum(x * x) / dim + eps)
    x *= tl.load(weight + place, inside, 0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + place, inside, 0.0).to(tl.float32)
    tl.store(out + row, x.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])
def _enter(  # type: ignore[no-untyped-def]
    qkv, turns, q_norm, k_norm, rows, positions, table, q_out, keys, values, eps, table_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TURNS: tl.constexpr,
    NORMS: tl.constexpr, LINES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A token, and a key with the queries that share it: lines of DIM features, the queries first, key, value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, place = tl.arange(0, LINES)[:, None], tl.arange(0, HALF)[None, :]
    inside = (line < SHARED + 2) & (place < DIM // 2)
    first = qkv + (token * HEADS + head) * ((SHARED + 2) * DIM) + line * DIM + place
    left = tl.load(first, inside, 0.0).to(tl.float32)
    right = tl.load(first + DIM // 2, inside, 0.0).to(tl.float32)
    position = tl.load(positions + token)
    is_value = line == SHARED + 1
    if NORMS:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + eps)[:, None]
        is_key = line == SHARED
        has_place = place < DIM // 2
        of_q_left, of_k_left = tl.load(q_norm + place, has_place, 0.0), tl.load(k_norm + place, has_place, 0.0)
        of_q_right = tl.load(q_norm + DIM // 2 + place, has_place, 0.0)
        of_k_right = tl.load(k_norm + DIM // 2 + place, has_place, 0.0)
        by_left = scale * tl.where(is_key, of_k_left, of_q_left).to(tl.float32)
        by_right = scale * tl.where(is_key, of_k_right, of_q_right).to(tl.float32)
        # As in the model, what was normed is rounded before it is rotated.
        left = tl.where(is_value, left, (left * by_left).to(qkv.dtype.element_ty).to(tl.float32))
        right = tl.where(is_value, right, (right * by_right).to(qkv.dtype.element_ty).to(tl.float32))
    if TURNS:
        turn = turns + position.to(tl.int64) * DIM + place
        cos, sin = tl.load(turn, place < DIM // 2, 1.0), tl.load(turn + DIM // 2, place < DIM // 2, 0.0)
        turned = left * cos - right * sin
        right = tl.where(is_value, right, right * cos + left * sin)
        left = tl.where(is_value, left, turned)
    left, right = left.to(qkv.dtype.element_ty), right.to(qkv.dtype.element_ty)
    q = q_out + (token * HEADS + head) * (SHARED * DIM) + line * DIM + place
    is_query = inside & (line < SHARED)
    tl.store(q, left, is_query)
    tl.store(q + DIM // 2, right, is_query)
    left = tl.where(tl.abs(left.to(tl.float32)) < float("inf"), left, 0.0)
    right = tl.where(tl.abs(right.to(tl.float32)) < float("inf"), right, 0.0)
    page = tl.load(table + tl.load(rows + token).to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
    slot = ((page * PAGE + position % PAGE) * HEADS + head) * DIM + place
    is_key = inside & (line == SHARED)
    tl.store(keys + slot + line * 0, left, is_key)
    tl.store(keys + slot + DIM // 2 + line * 0, right, is_key)
    tl.store(values + slot + line * 0, left, inside & is_value)
    tl.store(values + slot + DIM // 2 + line * 0, right, inside & is_value)


@triton.jit(do_not_specialize_on_alignment=["tiles", "rows", "positions", "largests", "totals"])
def _attend(  # type: ignore[no-untyped-def]
    q, tiles, rows, positions, table, keys, values, out, parts, largests, totals, scale, table_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, IN_PIECES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A row of the tile is a query of one head: all heads of its first token that share the key, then the next's."""
    head, tile = tl.program_id(0) % HEADS, tiles + 5 * (tl.program_id(0) // HEADS)
    count = tl.load(tile + 1)
    if count == 0:
        return
    first = tl.load(tile)
    start = tl.load(positions + first)
    row, place = tl.arange(0, ROWS), tl.arange(0, PADDED)
    token = row // SHARED
    is_query = token < count
    has_place = place < DIM
    where = (first + token).to(tl.int64) * (HEADS * SHARED) + head * SHARED + row % SHARED
    query = tl.load(q + where[:, None] * DIM + place[None, :], is_query[:, None] & has_place[None, :], 0.0)
    low, high = 0, start + count  # of the keys that the last query sees
    if IN_PIECES:
        piece, pieces = tl.load(tile + 2), tl.load(tile + 3)
        share = tl.cdiv(tl.cdiv(high, pieces), KEYS) * KEYS
        low = piece * share
        high = tl.minimum(low + share, high)
    pages = table + tl.load(rows + first).to(tl.int64) * table_stride
    largest = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    for begin in range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < high
        page = tl.load(pages + key // PAGE, is_key, 0).to(tl.int64)
        slot = ((page * PAGE + key % PAGE) * HEADS + head) * DIM
        k = tl.load(keys + slot[None, :] + place[:, None], is_key[None, :] & has_place[:, None], 0.0)
        scores = tl.dot(query, k, input_precision=PRECISION) * scale
        scores = tl.where(is_key[None, :] & (key[None, :] <= start + token[:, None]), scores, _LOWEST)
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(scores > _LOWEST, tl.exp2(scores - larger[:, None]), 0.0)
        correction = tl.exp2(largest - larger)
        v = tl.load(values + slot[:, None] + place[None, :], is_key[:, None] & has_place[None, :], 0.0)
        total = total * correction + tl.sum(weights, 1)
        result = result * correction[:, None]
        result = tl.dot(weights.to(v.dtype), v, result, input_precision=PRECISION)
        largest = larger
    if IN_PIECES:
        if pieces > 1:
            part = ((tl.load(tile + 4) + piece).to(tl.int64) * HEADS + head) * SHARED + row
            is_part = is_query[:, None] & has_place[None, :]
            tl.store(parts + part[:, None] * DIM + place[None, :], result, is_part)
            tl.store(largests + part, largest, is_query)
            tl.store(totals + part, total, is_query)
        is_query = token < tl.where(pieces > 1, 0, count)
    result /= tl.where(total == 0, 1.0, total)[:, None]  # 0: of rows that are no query's
    is_out = is_query[:, None] & has_place[None, :]
    tl.store(out + where[:, None] * DIM + place[None, :], result.to(out.dtype.element_ty), is_out)


@triton.jit(do_not_specialize_on_alignment=["joins", "largests", "totals"])
def _merge(  # type: ignore[no-untyped-def]
    joins, parts, largests, totals, out, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Of one head all pieces, some at a time."""
    head, join = tl.program_id(0) % HEADS, joins + 3 * (tl.program_id(0) // HEADS)
    pieces = tl.load(join + 1)
    if pieces == 0:
        return
    token, room = tl.load(join), tl.load(join + 2)
    some, place = tl.arange(0, 16), tl.arange(0, PADDED)
    largest, total = tl.full([1], _LOWEST, tl.float32), tl.zeros([1], tl.float32)
    result = tl.zeros([PADDED], tl.float32)
    for begin in range(0, pieces, 16):
        is_part = begin + some < pieces
        part = (room + begin + some).to(tl.int64) * HEADS + head
        of_part = tl.load(largests + part, is_part, _LOWEST)
        sums = tl.load(totals + part, is_part, 0.0)
        larger = tl.maximum(largest, tl.max(of_part))
        weight = tl.where(sums > 0, tl.exp2(of_part - larger), 0.0)
        has = is_part[:, None] & (place < DIM)[None, :]
        rows = tl.load(parts + part[:, None] * DIM + place[None, :], has, 0.0)
        correction = tl.exp2(largest - larger)
        total = total * correction + tl.sum(sums * weight)
        result = result * correction + tl.sum(rows * weight[:, None], 0)
        largest = larger
    where = (token.to(tl.int64) * HEADS + head) * DIM + place
    tl.store(out + where, (result / total).to(out.dtype.element_ty), place < DIM)


@triton.jit
def _gated(both, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    gate = tl.load(both + row * 2 * width + place, inside, 0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + place, inside, 0.0)
    # As in the model, the activation is rounded before it is multiplied.
    activated = (gate * tl.sigmoid(gate)).to(both.dtype.element_ty)
    tl.store(out + row * width + place, activated * up, inside)


@triton.jit
def _in_8_bits(x, out, scales, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = place < columns
    value = tl.load(x + row * columns + place, inside, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value)), _SMALLEST) / 448.0
    tl.store(scales + row, scale)
    tl.store(out + row * columns + place, (value / scale).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def _thin(  # type: ignore[no-untyped-def]
    x, row_scales, weight, scales, bias, out, parts, counts, rows, columns, inner,
    IN_8_BITS: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The weight is the left side of the product: so it goes from registers, where it is widened, to the arithmetic."""
    block, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column, row = block * COLUMNS + tl.arange(0, COLUMNS), tile * ROWS + tl.arange(0, ROWS)
    has_column, has_row = column < columns, row < rows
    of_weight, of_x = weight + column.to(tl.int64)[:, None] * inner, x + row[None, :] * inner
    share = tl.cdiv(tl.cdiv(inner, SPLITS), STEP) * STEP
    low = split * share
    high = tl.minimum(low + share, inner)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for begin in range(low, high, STEP):
        place = begin + tl.arange(0, STEP)
        inside = place < high
        right = tl.load(of_x + place[:, None], inside[:, None] & has_row[None, :], 0.0)
        left = tl.load(of_weight + place[None, :], has_column[:, None] & inside[None, :], 0 if not IN_8_BITS else 0.0)
        # Hopper adds up products of 8-bit floats in less than fp32: so not more than 128 of them.
        total = tl.dot(left.to(right.dtype), right, total, max_num_imprecise_acc=128)
    if SPLITS > 1:
        element = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        which = tile * tl.num_programs(0) + block
        of_parts = parts + which.to(tl.int64) * (SPLITS * COLUMNS * ROWS) + element
        tl.store(of_parts + split * (COLUMNS * ROWS), total)
        tl.debug_barrier()  # all of this program's part is there before it is counted
        is_last = tl.atomic_add(counts + which, 1) == SPLITS - 1
        if is_last:
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for each in tl.static_range(SPLITS):
                total += tl.load(of_parts + each * (COLUMNS * ROWS), cache_modifier=".cg")
            tl.store(counts + which, 0)
        has_row = row < tl.where(is_last, rows, 0)
    total *= tl.load(scales + column, has_column, 0.0)[:, None]
    if IN_8_BITS:
        total *= tl.load(row_scales + row, has_row, 0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, has_column, 0.0).to(tl.float32)[:, None]
    where = row.to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(out + where, total.to(out.dtype.element_ty), has_column[:, None] & has_row[None, :])


@triton.jit
def _widen(weight, scales, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(weight + row * columns + place, place < columns, 0).to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * columns + place, wide.to(out.dtype.element_ty), place < columns)
