"""Ring attention: queries stay, keys and values pass from rank to rank, and each rank joins the blocks it has seen.

While a rank computes with the keys and values it holds, it already sends them to the next rank and receives those of
the one before. In the backward pass they make the same round again; their gradients follow one hop behind: made by the
first rank that is not their owner, added to by every further one, and sent home by the last.

Which part of the sequence each rank holds is an `Order`: for each rank, the numbers of its chunks of the sequence. A
causal model skips what no query may see, and an order that gives each rank an early chunk and a late one leaves all
ranks with equally much to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.parallel import blocks

Order = tuple[tuple[int, ...], ...]


class Block(NamedTuple):
    """The places of the queries and of the keys, out of those that two ranks hold, that have to do with each other."""

    queries: slice
    keys: slice
    diagonal: bool  # whether each query sees only keys up to its own place


def visible(order: Order, rank: int, other: int, length: int, causal: bool) -> Block | None:
    """What `rank`'s queries see of the keys of `other`, each rank holding `length` positions; None for nothing."""
    if rank == other:
        return Block(slice(0, length), slice(0, length), causal)
    pairs = {
        (row, column)
        for row, query in enumerate(order[rank])
        for column, key in enumerate(order[other])
        if not causal or key < query
    }
    if not pairs:
        return None
    rows, columns = (range(min(places), max(places) + 1) for places in zip(*pairs, strict=True))
    if len(pairs) != len(rows) * len(columns):
        raise ValueError(f"in this order the chunks that rank {rank} sees of rank {other}'s are no rectangle: {order}")
    chunk = length // len(order[rank])
    queries, keys = (slice(places.start * chunk, places.stop * chunk) for places in (rows, columns))
    return Block(queries, keys, diagonal=False)


def attention(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, causal: bool, order: Order, group: dist.ProcessGroup
) -> Tensor:
    """What this rank's queries attend to in the whole sequence."""
    out_BHSD: Tensor = _Ring.apply(q_BHSD, k_BGSD, v_BGSD, causal, order, group)
    return out_BHSD


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, order: Order, group: dist.ProcessGroup
    ) -> Tensor:
        q, own = q.contiguous(), torch.stack([k, v])
        out = q.new_zeros(q.shape, dtype=blocks.accumulate(q.dtype))
        lse = out.new_full(q.shape[:-1], -torch.inf)
        for other, (keys, values) in _around(own, group):
            if block := visible(order, group.rank(), other, q.shape[2], causal):
                rows, columns, diagonal = block
                seen = blocks.forward(q[:, :, rows], keys[:, :, columns], values[:, :, columns], causal=diagonal)
                out[:, :, rows], lse[:, :, rows] = blocks.join(out[:, :, rows], lse[:, :, rows], *seen)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        ctx.causal, ctx.order, ctx.group = causal, order, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, own, out, lse = ctx.saved_tensors
        rank, grad = ctx.group.rank(), grad.contiguous()
        q_grad = torch.zeros_like(q, dtype=lse.dtype)
        own_grad = torch.zeros_like(own, dtype=lse.dtype)
        hop = None
        for other, (keys, values) in _around(own, ctx.group):
            share = own_grad if other == rank else torch.zeros_like(own_grad)
            if block := visible(ctx.order, rank, other, q.shape[2], ctx.causal):
                rows, columns, diagonal = block
                of_rows = grad[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows]
                of_columns = keys[:, :, columns], values[:, :, columns]
                of_q, *of_kv = blocks.backward(*of_rows, *of_columns, causal=diagonal)
                q_grad[:, :, rows] += of_q
                share[0, :, :, columns], share[1, :, :, columns] = of_kv
            if other != rank:
                if hop:
                    share += hop.arrived()
                hop = _Hop(share, ctx.group)
        if hop:
            own_grad += hop.arrived()
        return q_grad.to(q.dtype), *own_grad.to(own.dtype), None, None, None


def _around(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Every rank's tensor, this rank's own first; the next is on its way while the caller works with one."""
    rank, size = group.rank(), group.size()
    held = own
    for step in range(size):
        hop = _Hop(held, group) if step < size - 1 else None
        yield (rank - step) % size, held
        if hop:
            held = hop.arrived()


class _Hop:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._outgoing, self._incoming = tensor, torch.empty_like(tensor)
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._outgoing, after, group),
                dist.P2POp(dist.irecv, self._incoming, before, group),
            ]
        )

    def arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._incoming
