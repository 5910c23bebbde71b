"""The model on a GPU: its own parts and weights, in few kernels, over a cache of pages.

What a step needs to know goes to the device in one packet of numbers: the row, the position and the token of each place
of the step, the tiles in which attention is computed (see pieces.py), and what tokens are drawn by. Answers come first
among the places. A token that the step before has drawn is taken from where that left it, so that a step can be
launched before anybody has seen the last one's tokens.

Most steps have one of a few sizes, filled up with places that belong to nobody (a row and a page of their own), and for
each size there is a CUDA graph: the whole forward pass is one launch. (See graphs.py.) Steps that read more than the
largest of them are launched kernel by kernel: the GPU has enough to do meanwhile. A size that reads prompts is filled
up further where that is faster (rows.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.models.parts import SwiGLU
from echelon.parallel import shards
from echelon.parallel.tensor import kv_heads_of
from echelon.serve import drawing, kernels
from echelon.serve.graphs import Captures, Graph
from echelon.serve.narrow import NarrowWeight
from echelon.serve.pieces import Pieces
from echelon.serve.rows import layer_seconds, quickest
from echelon.serve.sample import COLUMNS, Chosen, Draws, sample
from echelon.serve.step import PENDING, Part, Shape

_TILE = 128  # rows of a tile of a prompt: queries times the heads that share a key
_PROMPTS = 16  # at least, in a step that is captured; in larger steps as many as have so many tokens each


class Size(NamedTuple):
    """Of a step: so many answers, and tokens of prompts."""

    answers: int
    reading: int


class _Computed(NamedTuple):
    """What the forward pass must know: row, position and token of each place, and for attention (see `kernels.attend`)
    the tiles of answers, how their pieces are joined, and the tiles of prompts.
    """

    places_3T: Any  # tensors in the packet; NumPy's arrays on the way there
    alone_X5: Any
    joins_J3: Any
    tiles_X5: Any


class Fused:
    """`sizes` are those that steps are filled up to and captured for; none: nothing is captured."""

    @torch.no_grad()
    def __init__(self, model: Any, shape: Shape, token_budget: int, sizes: list[Size]) -> None:
        self._model = model
        weight = model.norm.weight
        self._device, attention = weight.device, model.blocks[0].attention
        self._nobody = shape.rows
        heads, longest = kv_heads_of(attention), shape.row_pages * shape.page_size
        self._pieces = Pieces(heads, kernels.processors(self._device), longest)
        self._table_RP = torch.full((shape.rows + 1, shape.row_pages), shape.pages, device=self._device).int()
        self._latest_R = torch.zeros(shape.rows + 1, dtype=torch.int64, device=self._device)
        cache = shape.pages + 1, shape.page_size, heads, attention.head_dim
        self._caches = [(weight.new_zeros(cache), weight.new_zeros(cache)) for _ in model.blocks]
        self._turns_LD = None if attention.rope is None else _turns(attention, longest, self._device)
        self._mlps = [mlp_of(block.mlp) for block in model.blocks]
        self._queries = max(_TILE // attention.queries_per_key, 1)
        if weight.dtype == torch.float32:
            self._queries = max(self._queries // 4, 1)  # of which as many fit into a processor's memory
        seconds = layer_seconds(attention, self._mlps[0])
        self._filled = {size: quickest(sum(size), seconds) if size.reading else sum(size) for size in sizes}
        places = max(token_budget, shape.rows, *self._filled.values())
        tiles = max(places // self._queries + shape.rows, *map(self._tiles, sizes), 0)
        alone, joins = self._pieces.most(shape.rows)
        room = 3 * places + 5 * (alone + tiles) + 3 * joins + (1 + COLUMNS + 2 * shape.row_pages) * shape.rows
        self._packet = torch.zeros(room, dtype=torch.int32, device=self._device)
        on_gpu = self._device.type == "cuda"  # else Triton's interpreter computes, for tests
        self._pinned = [
            (torch.empty(room, dtype=torch.int32, pin_memory=on_gpu), torch.cuda.Event() if on_gpu else None)
            for _ in range(2)
        ]
        self._captures = Captures() if sizes else None
        self._graphs = {size: self._capture(size) for size in sorted(sizes, key=sum, reverse=True)}
        self._sizes = list(self._graphs)[::-1]

    def launch(self, parts: list[Part], draws: Draws | None) -> Chosen | None:
        """See `way.Way`."""
        answers = next((place for place, part in enumerate(parts) if len(part.tokens) > 1), len(parts))
        size = self._size(parts, answers)
        planned, last, pages = self._plan(parts, answers, size)
        *sent, last_R, columns_CR, pages_2U = self._send([*planned, last, (draws or Draws()).columns(), pages])
        computed = _Computed(*sent)
        if pages_2U.numel():
            self._table_RP.view(-1)[pages_2U[0].long()] = pages_2U[1]
        whole = None if size is None else self._graphs[size]
        hidden_TD = self._forward(computed) if whole is None else whole.replay()
        if not len(last_R):
            return None if draws is None else Chosen(self._latest_R[:0])
        logits_RV = self._model.head(hidden_TD[last_R])
        if draws is None:
            return None
        chosen = sample(logits_RV, draws, columns_CR, drawing)
        self._latest_R[computed.places_3T[0, last_R].long()] = chosen.tokens_R
        return chosen

    def _size(self, parts: list[Part], answers: int) -> Size | None:
        """The smallest that was captured of those that have room for a step."""
        lengths = [len(part.tokens) for part in parts[answers:]]
        reading, tiles = sum(lengths), sum(-(-length // self._queries) for length in lengths)
        for size in self._sizes:
            if size.answers >= answers and size.reading >= reading and self._tiles(size) >= tiles:
                return size
        return None

    def _tiles(self, size: Size) -> int:
        """Each prompt may end with one that is not full."""
        return size.reading // self._queries + max(size.reading // _PROMPTS, _PROMPTS) if size.reading else 0

    def _plan(
        self, parts: list[Part], answers: int, size: Size | None
    ) -> tuple[_Computed, NDArray[np.int32], NDArray[np.int32]]:
        """What is computed; the places whose successors are wanted; and where in the table which new pages go."""
        rows: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        tiles: list[tuple[int, int, int]] = []  # of prompts: keys, first place, places
        last: list[int] = []
        entries: list[int] = []
        pages: list[int] = []
        width = self._table_RP.shape[1]

        def fill(places: int) -> None:
            more = places - len(rows)
            rows.extend([self._nobody] * more)
            positions.extend([0] * more)
            tokens.extend([0] * more)

        for row, start, of_part, first_page, new, is_last in parts:
            count = len(of_part)
            if count == 1:
                rows.append(row)
                positions.append(start)
            else:
                if size is not None and not tiles:
                    fill(size.answers)
                first = len(rows)
                for at in range(0, count, self._queries):
                    queries = min(self._queries, count - at)
                    tiles.append((start + at + queries, first + at, queries))
                rows += [row] * count
                positions += range(start, start + count)
            tokens += of_part
            if is_last:
                last.append(len(rows) - 1)
            if new:
                entries += range(row * width + first_page, row * width + first_page + len(new))
                pages += new
        alone_X5, joins_J3 = self._pieces.of(np.array(positions[:answers]) + 1)
        tiles.sort(reverse=True)
        tiles_X5 = np.array([(place, count, 0, 1, 0) for _, place, count in tiles], np.int32).reshape(-1, 5)
        if size is not None:
            fill(self._filled[size])
            alone, joins = self._pieces.most(size.answers)
            alone_X5, joins_J3 = _padded(alone_X5, alone), _padded(joins_J3, joins)
            tiles_X5 = _padded(tiles_X5, self._tiles(size))
        computed = _Computed(np.array([rows, positions, tokens], np.int32), alone_X5, joins_J3, tiles_X5)
        return computed, np.array(last, np.int32), np.array([entries, pages], np.int32)

    def _send(self, arrays: list[NDArray[np.int32]]) -> list[Tensor]:
        """In one copy, from one of two places, so that the last one may still be under way; not the one before it."""
        pinned, copied = self._pinned[0]
        self._pinned.reverse()
        if copied is not None:
            copied.synchronize()
        host, end = pinned.numpy(), 0
        for array in arrays:
            host[end : end + array.size].reshape(array.shape)[...] = array
            end += array.size
        self._packet[:end].copy_(pinned[:end], non_blocking=True)
        if copied is not None:
            copied.record()
        return self._in_packet([array.shape for array in arrays])

    def _in_packet(self, shapes: Iterable[tuple[int, ...]]) -> list[Tensor]:
        """Where, one behind the other, such arrays lie."""
        found, end = [], 0
        for shape in shapes:
            found.append(self._packet[end : end + math.prod(shape)].view(shape))
            end += math.prod(shape)
        return found

    def _capture(self, size: Size) -> Graph:
        alone, joins = self._pieces.most(size.answers)
        computed = _Computed(
            *self._in_packet([(3, self._filled[size]), (alone, 5), (joins, 3), (self._tiles(size), 5)])
        )
        self._packet.zero_()
        computed.places_3T[0] = self._nobody
        compute = partial(self._forward, computed)
        compute()  # kernels are compiled, and libraries take their memory, before anything is captured
        assert self._captures is not None
        return Graph(compute, self._captures, shards.meeting_of(self._model))

    def _forward(self, computed: _Computed) -> Tensor:
        """The hidden states of all places, normed."""
        model = self._model
        rows_T, positions_T, given_T = computed.places_3T
        tokens_T = torch.where(given_T == PENDING, self._latest_R[rows_T.long()], given_T)
        stream_TD: Tensor = model.tokens(tokens_T)
        if hasattr(model, "positions"):
            stream_TD = stream_TD + model.positions(positions_T)
        added_TD: Tensor | None = None
        for block, mlp, cache in zip(model.blocks, self._mlps, self._caches, strict=True):
            x_TD = _norm(block.attention_norm, stream_TD, added_TD)
            added_TD = self._attend(block.attention, x_TD, cache, computed)
            x_TD = _norm(block.mlp_norm, stream_TD, added_TD)
            added_TD = mlp(x_TD)
        return _norm(model.norm, stream_TD, added_TD)

    def _attend(self, attention: Any, x_TD: Tensor, cache: tuple[Tensor, Tensor], computed: _Computed) -> Tensor:
        norms = None
        if attention.q_norm is not None:
            norms = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
        rows_T, positions_T, _ = computed.places_3T
        where = rows_T, positions_T, self._table_RP, *cache
        q_THD = kernels.enter(attention.qkv(x_TD), self._turns_LD, norms, *where)
        out_THD = torch.empty_like(q_THD)
        if len(computed.alone_X5):
            kernels.attend(q_THD, computed.alone_X5, *where, out_THD, queries=1, joins_J3=computed.joins_J3)
        if len(computed.tiles_X5):
            kernels.attend(q_THD, computed.tiles_X5, *where, out_THD, queries=self._queries)
        added_TD: Tensor = attention.out(out_THD.flatten(1))
        return added_TD


def misfit(model: Any) -> str:
    """Why a model cannot be computed so; nothing if it can."""
    block = model.blocks[0]
    if block.post_norm or not isinstance(model.norm, nn.RMSNorm | nn.LayerNorm):
        return "its norms stand elsewhere"
    if any(type(each) is not nn.Parameter and not isinstance(each, NarrowWeight) for each in block.parameters()):
        return "its weights are torchao's"
    if model.norm.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it is in {model.norm.weight.dtype}"
    if block.attention.head_dim % 2:
        return f"its heads have {block.attention.head_dim} features, an odd number"
    return ""


def _padded(rows: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """With tiles, or joins, that are none."""
    return np.concatenate([rows, np.zeros((length - len(rows), rows.shape[1]), np.int32)])


def _norm(norm: Any, stream_TD: Tensor, added_TD: Tensor | None) -> Tensor:
    centred = isinstance(norm, nn.LayerNorm)
    bias = norm.bias if centred else None
    return kernels.norm(stream_TD, added_TD, norm.weight, bias, norm.eps, centred=centred)


@torch.no_grad()
def join_mlps(model: Any) -> None:
    """Let gate and up be parts of one weight, so that they can be one product."""
    for block in model.blocks:
        if isinstance(block.mlp, SwiGLU) and _joined(block.mlp) is None:
            gate, up = block.mlp.gate, block.mlp.up
            for one, other in zip(_tensors(gate.weight), _tensors(up.weight), strict=True):
                one.data, other.data = torch.cat([one, other]).chunk(2)
    torch.cuda.empty_cache()  # of where they lay before, which is not given back while a graph is captured


def _joined(mlp: Any) -> Tensor | None:
    """The weights of gate and up as one, if they lie one behind the other."""
    gate, up = mlp.gate.weight, mlp.up.weight
    both: list[Any] = [_behind(one.data, other.data) for one, other in zip(_tensors(gate), _tensors(up), strict=True)]
    if any(each is None for each in both):
        return None
    whole: Tensor = type(gate).made(both[0], both[1], gate.dtype) if isinstance(gate, NarrowWeight) else both[0]
    return whole


def _tensors(weight: Tensor) -> list[Tensor]:
    """What holds a weight's values: itself, unless it is in 8 bits."""
    return [weight.data8_NK, weight.scale_N1] if isinstance(weight, NarrowWeight) else [weight]


def _behind(one: Tensor, other: Tensor) -> Tensor | None:
    """Two tensors as one, if they are parts of one."""
    is_one = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    if not is_one or other.storage_offset() != one.storage_offset() + one.numel():
        return None
    return torch.as_strided(one, (len(one) + len(other), one.shape[1]), one.stride(), one.storage_offset())


def mlp_of(mlp: Any) -> Any:
    """With one product for gate and up."""
    if not isinstance(mlp, SwiGLU):
        return mlp
    both = _joined(mlp)
    assert both is not None
    bias = None if mlp.gate.bias is None else torch.cat([mlp.gate.bias, mlp.up.bias])
    return lambda x_TD: mlp.down(kernels.gated(F.linear(x_TD, both, bias)))


def _turns(attention: Any, length: int, device: torch.device) -> Tensor:
    """Cosines and sines at each position, as `Rope.rotate` makes them."""
    frequencies = attention.rope.frequencies(attention.head_dim, device, torch.float32)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)
