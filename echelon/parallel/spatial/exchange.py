"""What tiles tell each other, forth and back: differentiable, and begun before it is waited for.

`fetch` gives each rank the rows that it wants of an axis, from whoever holds them; in the backward pass what it learned
about them goes back to their owners, who add it up. It has two halves, and whoever computes between them lets the
messages travel meanwhile: `began` sends, `arrived` waits. In the backward pass the order turns around by itself: what
comes after `arrived` is differentiated first, then `arrived` sends, what lies between is computed, and `began` waits.

Between tiles every rank goes back with a gradient of its own, and what all have alike is to be blamed by the sum of
them (`summed`). At the end all have the same result and the same gradient of it, of which each takes its share
(`shared`). So the ranks' gradients of a weight add up to what one process computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.parallel.spatial.cut import Parcel, bounds, parcels, rows

Wanted = tuple[tuple[range, ...], ...]  # of each tile along the axis


def fetch(x: Tensor, dim: int, length: int, wanted: Wanted, group: dist.ProcessGroup) -> Tensor:
    """The wanted rows of an axis that `x` is this rank's tile of, one range behind the other."""
    held = bounds(length, len(wanted))
    if all(pieces == (has,) for pieces, has in zip(wanted, held, strict=True)):
        return x
    return arrived(*began(x, dim, length, wanted, group))


def began(
    x: Tensor, dim: int, length: int, wanted: Wanted, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, _Journey]:
    """What was given, a token for `arrived`, and the journey. Of what was given one computation may be made, by an
    operation whose gradient is new: in the backward pass what others learned is added up in it, without a copy.
    """
    journey = _Journey(dim, length, wanted, group)
    kept, token = _Began.apply(x, journey)
    return kept, token, journey


def arrived(x: Tensor, token: Tensor, journey: _Journey) -> Tensor:
    out: Tensor = _Arrived.apply(x, token, journey)
    return out


class _Journey:
    """The messages of one exchange, in both directions."""

    dtype: torch.dtype
    device: torch.device

    def __init__(self, dim: int, length: int, wanted: Wanted, group: dist.ProcessGroup) -> None:
        self.dim, self.group = dim, group
        me, found = group.rank(), parcels(length, wanted)
        self.to = {target: each for (source, target), each in found.items() if source == me}
        self.of = {source: each for (source, target), each in found.items() if target == me}
        self.wanted = rows(wanted[me])
        self.is_returning = False
        self.learned: Tensor | None = None  # about own rows, on the way back
        self._works: list[Any] = []
        self._received: dict[int, Tensor] = {}

    def send(self, x: Tensor) -> None:
        """Begin to give others what they want, and to receive what they have."""
        self._begin(x, x.shape, self.to, self.of, by_place=False)

    def send_back(self, grad: Tensor | None, like: Tensor) -> None:
        """The other way: what was learned about others' rows, if there are any, and what they learned about these."""
        self.is_returning = True
        self._begin(grad, like.shape, self.of if grad is not None else {}, self.to, by_place=True)

    def _begin(
        self,
        x: Tensor | None,
        shape: torch.Size,
        to: dict[int, list[Parcel]],
        of: dict[int, list[Parcel]],
        by_place: bool,
    ) -> None:
        me, operations = self.group.rank(), []
        for other in sorted((to.keys() | of.keys()) - {me}):
            if other in to:
                assert x is not None
                slab = torch.cat([self._slice(x, each, by_place) for each in to[other]], self.dim)
                operations.append(dist.P2POp(dist.isend, slab, group=self.group, group_peer=other))
            if other in of:
                count = sum(each.count for each in of[other])
                expected = [*shape[: self.dim], count, *shape[self.dim + 1 :]]
                self._received[other] = torch.empty(expected, dtype=self.dtype, device=self.device)
                operations.append(dist.P2POp(dist.irecv, self._received[other], group=self.group, group_peer=other))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def receive(self) -> dict[int, Tensor]:
        """Wait until all has arrived, here and elsewhere."""
        for work in self._works:
            work.wait()
        received, self._received, self._works = self._received, {}, []
        return received

    def _slice(self, x: Tensor, parcel: Parcel, by_place: bool) -> Tensor:
        return x.narrow(self.dim, parcel.place if by_place else parcel.start, parcel.count)

    def put(self, out: Tensor, slab: Tensor, pieces: list[Parcel]) -> None:
        at = 0
        for each in pieces:
            out.narrow(self.dim, each.place, each.count).copy_(slab.narrow(self.dim, at, each.count))
            at += each.count

    def add(self, out: Tensor, slab: Tensor, pieces: list[Parcel]) -> None:
        at = 0
        for each in pieces:
            out.narrow(self.dim, each.start, each.count).add_(slab.narrow(self.dim, at, each.count))
            at += each.count

    def own(self, x: Tensor, back: bool) -> Tensor | None:
        """What stays here."""
        pieces = self.of.get(self.group.rank())
        return None if pieces is None else torch.cat([self._slice(x, each, back) for each in pieces], self.dim)


class _Began(torch.autograd.Function):
    """Sends; returns what it was given, and a token that `_Arrived` depends on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: _Journey) -> tuple[Tensor, Tensor]:
        ctx.journey = journey
        journey.dtype, journey.device = x.dtype, x.device
        journey.send(x)
        return x.view_as(x), x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        journey: _Journey = ctx.journey
        grad = grad.contiguous()  # and nobody else's: see `began`
        if not journey.is_returning:  # nothing had come, so there was nothing to be learned about it
            journey.send_back(None, grad)
        for other, slab in journey.receive().items():
            journey.add(grad, slab, journey.to[other])
        if journey.learned is not None:
            journey.add(grad, journey.learned, journey.of[journey.group.rank()])
        journey.is_returning, journey.learned = False, None  # a graph that is retained goes back again
        return grad, None


class _Arrived(torch.autograd.Function):
    """Puts what was wanted together. What is learned about own rows, too, `_Began` adds up: of the few rows of a border
    no gradient as large as the tile is made.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        shape = list(x.shape)
        shape[journey.dim] = journey.wanted
        out, me = x.new_empty(shape), journey.group.rank()
        if (own := journey.own(x, back=False)) is not None:
            journey.put(out, own, journey.of[me])
        for other, slab in journey.receive().items():
            journey.put(out, slab, journey.of[other])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        journey: _Journey = ctx.journey
        journey.send_back(grad, grad)
        journey.learned = journey.own(grad, back=True)
        return None, grad.new_empty(0), None


class _Sum(torch.autograd.Function):
    """The sum over ranks, each of which does something else with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Shared(torch.autograd.Function):
    """Of what all ranks have alike, each is to blame for its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what ranks have; what they do with it may differ."""
    out: Tensor = _Sum.apply(x, group)
    return out


def shared(x: Tensor, ranks: int) -> Tensor:
    """What all ranks have alike, at the end, where all go back with the same gradient."""
    out: Tensor = _Shared.apply(x, ranks)
    return out
