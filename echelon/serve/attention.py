"""Attention over pages: what a model's `attend` is replaced by.

All tokens of a step come as one sequence, of whatever requests. Their keys and values go into the cache; then each
span's queries meet the pages of its request. Spans of one token (answers) are taken together with others of about the
same length, a longer one (of a prompt) by itself, in pieces if it is so long that its scores would fill memory. Heads
that share a key stand beside each other as if they were queries, so that keys are never copied for each.

`reproducible` computes in pieces whose shapes never change: tiles of queries, blocks of keys from the first on. A
query's sums then have the same order whatever else is in the step, however its prompt was cut, and wherever its pages
came from; keys beyond a query add exactly nothing. (See fixed.py for the other half: matrix products.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.serve.step import Part

TILE, BLOCK = 8, 128  # queries, keys
_MOST_SCORES = 2**23  # of a head, at once


@dataclass
class Group:
    """Parts that are computed at once: R of them with S queries each, over P pages."""

    rows_RS: Tensor  # where the queries are among the step's tokens
    pages_RP: Tensor
    positions_RS: Tensor
    unseen_R1QL: Tensor | None = None  # what hides keys from queries: the first layer makes it, for all


@dataclass(frozen=True)
class Step:
    """What all layers need to know of a step."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor  # where in the cache the tokens' keys go
    groups: list[Group]
    last_R: Tensor  # the tokens whose successors are wanted


def plan(parts: list[Part], table: list[list[int]], page_size: int, device: torch.device, reproducible: bool) -> Step:
    """`table` has the pages of each row."""
    firsts: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for part in parts:
        firsts.append(len(tokens))
        tokens += part.tokens
        places = range(part.start, part.start + len(part.tokens))
        positions += places
        slots += [table[part.row][place // page_size] * page_size + place % page_size for place in places]
    by_size: dict[tuple[int, int], list[tuple[list[int], list[int], list[int]]]] = defaultdict(list)
    for first, part in zip(firsts, parts, strict=True):
        count = len(part.tokens)
        tile = TILE if reproducible else max(_MOST_SCORES // (part.start + count), 1)
        for start in range(0, count, tile):
            places = range(start, min(start + tile, count))
            rows = [first + place for place in places]
            seen = [part.start + place for place in places]
            short = tile - len(rows) if reproducible else 0  # a tile that is not full computes its first query again
            used = table[part.row][: seen[-1] // page_size + 1]
            size = len(rows) + short, 1 << (len(used) - 1).bit_length()
            if not reproducible and len(rows) > 1:
                size = -rows[0], len(used)  # alone
            by_size[size].append((rows + rows[:1] * short, seen + seen[:1] * short, used))
    last = [first + len(part.tokens) - 1 for first, part in zip(firsts, parts, strict=True) if part.is_last]

    def tensor(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    groups = []
    for of_size in by_size.values():
        longest = max(len(pages) for _, _, pages in of_size)
        groups.append(
            Group(
                tensor([rows for rows, _, _ in of_size]),
                tensor([pages + pages[:1] * (longest - len(pages)) for _, _, pages in of_size]),
                tensor([seen for _, seen, _ in of_size]),
            )
        )
    return Step(tensor(tokens), tensor(positions), tensor(slots), groups, tensor(last))


class PagedAttention:
    """The cache of one layer, and attention over it. `step` is set before each step, the same for all layers."""

    def __init__(self, shape: tuple[int, int, int, int], like: Tensor, reproducible: bool) -> None:
        """`shape` is that of the keys: pages, tokens of a page, heads, features of a head."""
        self._reproducible = reproducible
        self.step: Step | None = None
        self.keys_PSGD, self.values_PSGD = like.new_zeros(shape), like.new_zeros(shape)

    def __call__(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        *,
        causal: bool,
        mask_BS: Tensor | None = None,
        positions_S: Tensor | None = None,
    ) -> Tensor:
        step = self.step
        assert step is not None
        assert causal
        self._write(step, k_BGSD[0].transpose(0, 1), v_BGSD[0].transpose(0, 1))
        heads, keys = q_BHSD.shape[1], k_BGSD.shape[1]
        q_TGND = q_BHSD[0].transpose(0, 1).unflatten(1, (keys, heads // keys))
        out_THD = torch.empty_like(q_BHSD[0].transpose(0, 1), memory_format=torch.contiguous_format)
        over = _over_blocks if self._reproducible else _over_pages
        for group in step.groups:
            q_RSGND = q_TGND[group.rows_RS]
            out_RGNSD = over(q_RSGND.permute(0, 2, 3, 1, 4), self.keys_PSGD, self.values_PSGD, group)
            out_THD[group.rows_RS] = out_RGNSD.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return out_THD.transpose(0, 1).unsqueeze(0)

    def _write(self, step: Step, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """What is not finite becomes 0. Hidden keys have weight 0, but 0 times infinity is no number: what overflowed
        for one request would spoil whoever has its page next.
        """
        for cache_PSGD, new_TGD in ((self.keys_PSGD, k_TGD), (self.values_PSGD, v_TGD)):
            cache_PSGD.flatten(0, 1).index_copy_(0, step.slots_T, new_TGD.nan_to_num(0.0, 0.0, 0.0))


def _select(cache_PSGD: Tensor, pages_RP: Tensor) -> Tensor:
    """The tokens of these pages, one after another."""
    chosen = cache_PSGD.index_select(0, pages_RP.flatten())
    return chosen.view(len(pages_RP), -1, *cache_PSGD.shape[2:]).transpose(1, 2)


def _unseen(group: Group, first: int, length: int, dtype: torch.dtype) -> Tensor:
    """What to add to the scores of `length` keys from `first` on: nothing for those that a query may see."""
    keys_L = torch.arange(first, first + length, device=group.positions_RS.device)
    hidden_RSL = keys_L > group.positions_RS.unsqueeze(-1)
    return torch.zeros(hidden_RSL.shape, dtype=dtype, device=hidden_RSL.device).masked_fill_(hidden_RSL, -torch.inf)


def _over_pages(q_RGNSD: Tensor, keys_PSGD: Tensor, values_PSGD: Tensor, group: Group) -> Tensor:
    k_RGLD, v_RGLD = _select(keys_PSGD, group.pages_RP), _select(values_PSGD, group.pages_RP)
    if group.unseen_R1QL is None:
        queries, length = q_RGNSD.shape[2:4]
        unseen_RSL = _unseen(group, 0, k_RGLD.shape[2], q_RGNSD.dtype)
        group.unseen_R1QL = (unseen_RSL if length == 1 else unseen_RSL.repeat(1, queries, 1)).unsqueeze(1)
    out_RGQD = F.scaled_dot_product_attention(q_RGNSD.flatten(2, 3), k_RGLD, v_RGLD, attn_mask=group.unseen_R1QL)
    return out_RGQD.view(q_RGNSD.shape)


def _over_blocks(q_RGNSD: Tensor, keys_PSGD: Tensor, values_PSGD: Tensor, group: Group) -> Tensor:
    """A softmax that goes on from block to block: its largest score, its sum and its result so far are corrected."""
    tiles, keys, queries, length, dim = q_RGNSD.shape
    a_block = BLOCK // keys_PSGD.shape[1]
    short = -group.pages_RP.shape[1] % a_block
    pages_RP = torch.cat([group.pages_RP, group.pages_RP[:, :1].expand(-1, short)], 1)
    wide = torch.promote_types(q_RGNSD.dtype, torch.float32)
    q_XQD = q_RGNSD.reshape(tiles * keys, queries * length, dim)
    largest_XQ1 = torch.full((*q_XQD.shape[:2], 1), -torch.inf, dtype=wide, device=q_XQD.device)
    sum_XQ1 = torch.zeros_like(largest_XQ1)
    out_XQD = torch.zeros(q_XQD.shape, dtype=wide, device=q_XQD.device)
    for start in range(0, pages_RP.shape[1], a_block):
        block_RP = pages_RP[:, start : start + a_block]
        k_XLD, v_XLD = (_select(cache, block_RP).flatten(0, 1) for cache in (keys_PSGD, values_PSGD))
        unseen_RSL = _unseen(group, start * keys_PSGD.shape[1], BLOCK, wide)
        unseen_XQL = unseen_RSL[:, None, None].expand(-1, keys, queries, -1, -1).reshape(len(q_XQD), -1, BLOCK)
        scores_XQL = torch.bmm(q_XQD, k_XLD.transpose(1, 2)).to(wide) / math.sqrt(dim) + unseen_XQL
        larger_XQ1 = torch.maximum(largest_XQ1, scores_XQL.amax(-1, keepdim=True))
        weights_XQL = (scores_XQL - larger_XQ1).exp()
        correction_XQ1 = (largest_XQ1 - larger_XQ1).exp()
        sum_XQ1 = sum_XQ1 * correction_XQ1 + weights_XQL.sum(-1, keepdim=True)
        out_XQD = out_XQD * correction_XQ1 + torch.bmm(weights_XQL.to(v_XLD.dtype), v_XLD).to(wide)
        largest_XQ1 = larger_XQ1
    return (out_XQD / sum_XQ1).to(q_RGNSD.dtype).view(q_RGNSD.shape)
