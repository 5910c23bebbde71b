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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.parallel.spatial.cut import Parcel, bounds, parcels
from echelon.parallel.spatial.tiles import AXES

Wanted = tuple[tuple[range, ...], ...]  # ranges of rows, of each tile along the axis


def fetch(x: Tensor, dim: int, length: int, wanted: Wanted, group: dist.ProcessGroup) -> Tensor:
    """The wanted rows of an axis that `x` is this rank's tile of, one range behind the other."""
    held = bounds(length, len(wanted))
    if all(pieces == (has,) for pieces, has in zip(wanted, held, strict=True)):
        return x
    _, token, journey = began(x, dim, length, wanted, group)
    pieces = arrived(token, journey)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def began(
    x: Tensor,
    dim: int,
    length: int,
    wanted: Wanted,
    group: dist.ProcessGroup,
    beside: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, _Journey]:
    """What was given, a token for `arrived`, and the journey. Of what was given one computation may be made, by an
    operation whose gradient is new: in the backward pass what others learned is added up in it, without a copy.

    What goes to others may be wider than the tile, by what is `beside` it, before and after.
    """
    held = [*beside[:1], x, *beside[1:]]
    journey = _Journey(held, dim, length, wanted, group)
    kept, token = _Began.apply(journey, len(beside[:1]), *held)
    return kept, token, journey


def arrived(token: Tensor, journey: _Journey) -> tuple[Tensor, ...]:
    """Each of the ranges that this rank wanted."""
    pieces: tuple[Tensor, ...] = _Arrived.apply(token, journey)
    return pieces


class _Journey:
    """The messages of one exchange, in both directions: a message to each other tile, of all that it shall have.

    What is `held` are tensors that lie beside each other; whoever wants rows gets them through all of these.
    """

    def __init__(self, held: Sequence[Tensor], dim: int, length: int, wanted: Wanted, group: dist.ProcessGroup) -> None:
        self.dim, self.group, self._across = dim, group, sum(AXES) - dim
        self._shapes = [list(each.shape) for each in held]
        self._like = held[0].new_empty(0)
        me, found = group.rank(), parcels(length, wanted)
        self._to = {target: each for (source, target), each in found.items() if source == me}
        self._of = {source: each for (source, target), each in found.items() if target == me}
        self._pieces = len(wanted[me])
        self._own: list[Tensor] = []  # what is wanted here, of own rows
        self._learned: list[tuple[Tensor, Parcel]] = []  # about own rows, on the way back
        self.is_returning = False
        self._works: list[Any] = []
        self._received: dict[int, Tensor] = {}

    def send(self, held: Sequence[Tensor]) -> None:
        """Begin to give others what they want, and to receive what they have."""

        def taken(parcel: Parcel) -> Tensor:
            parts = [each.narrow(self.dim, parcel.start, parcel.count) for each in held]
            return parts[0] if len(parts) == 1 else torch.cat(parts, self._across)

        slabs = {other: [taken(each) for each in to] for other, to in self._to.items()}
        self._own = slabs.get(self.group.rank(), [])
        self._begin(slabs, self._of)

    def send_back(self, grads: Sequence[Tensor]) -> None:
        """The other way: what was learned about others' rows, if there are any, and what they learned about these."""
        self.is_returning = True
        slabs = {
            other: [grads[each.piece].narrow(self.dim, each.place, each.count) for each in of]
            for other, of in (self._of.items() if grads else ())
        }
        me = self.group.rank()
        self._learned = [*zip(slabs[me], self._of[me], strict=True)] if me in slabs else []
        self._begin(slabs, self._to)

    def _begin(self, slabs: Mapping[int, list[Tensor]], of: Mapping[int, list[Parcel]]) -> None:
        me, operations = self.group.rank(), []
        for other in sorted((slabs.keys() | of.keys()) - {me}):
            if other in slabs:
                slab = slabs[other][0].contiguous() if len(slabs[other]) == 1 else torch.cat(slabs[other], self.dim)
                operations.append(dist.P2POp(dist.isend, slab, group=self.group, group_peer=other))
            if other in of:
                self._received[other] = self._new(sum(each.count for each in of[other]))
                operations.append(dist.P2POp(dist.irecv, self._received[other], group=self.group, group_peer=other))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def _new(self, count: int) -> Tensor:
        """Rows through all that is held."""
        shape = [*self._shapes[0]]
        shape[self.dim], shape[self._across] = count, sum(each[self._across] for each in self._shapes)
        return self._like.new_empty(shape)

    def receive(self) -> dict[int, Tensor]:
        """Wait until all has arrived, here and elsewhere."""
        for work in self._works:
            work.wait()
        received, self._received, self._works = self._received, {}, []
        return received

    def pieces(self) -> tuple[Tensor, ...]:
        """What was wanted, put together. A message that is all of a piece is not copied."""
        found: list[list[Tensor]] = [[] for _ in range(self._pieces)]
        received, own, self._own = self.receive(), self._own, []
        for other, of in sorted(self._of.items()):  # who holds earlier rows comes first
            if other not in received:
                slabs: Sequence[Tensor] = own
            elif len(of) == 1:
                slabs = [received[other]]
            else:
                slabs = received[other].split([each.count for each in of], self.dim)
            for slab, each in zip(slabs, of, strict=True):
                found[each.piece].append(slab)
        return tuple(self._piece(slabs) for slabs in found)

    def _piece(self, slabs: list[Tensor]) -> Tensor:
        if not slabs:
            return self._new(0)
        return slabs[0] if len(slabs) == 1 and not slabs[0]._is_view() else torch.cat(slabs, self.dim)

    def settle(self, grad: Tensor | None, which: int) -> list[Tensor]:
        """Add what was learned about own rows, here and elsewhere, to what is known otherwise of one of the tensors."""
        learned, self._learned, self.is_returning = self._learned, [], False  # a retained graph goes back again
        if grad is not None:
            grad = grad.contiguous()  # and nobody else's: see `began`
        elif learned and learned[-1][0].shape == torch.Size(self._shapes[which]):  # a copy is less than zeros and a sum
            grad = learned.pop()[0].clone(memory_format=torch.contiguous_format)
        else:
            grad = self._like.new_zeros(self._shapes[which])
        grads = [grad if n == which else self._like.new_zeros(shape) for n, shape in enumerate(self._shapes)]
        for other, slab in self.receive().items():
            to = self._to[other]
            learned += zip(slab.split([each.count for each in to], self.dim), to, strict=True)
        for slab, parcel in learned:
            parts = slab.split([each[self._across] for each in self._shapes], self._across)
            for each, part in zip(grads, parts, strict=True):
                each.narrow(self.dim, parcel.start, parcel.count).add_(part)
        return grads


class _Began(torch.autograd.Function):
    """Sends; returns the one of what it was given, and a token that `_Arrived` depends on."""

    @staticmethod
    def forward(ctx: Any, journey: _Journey, which: int, *held: Tensor) -> tuple[Tensor, Tensor]:
        ctx.journey, ctx.which = journey, which
        ctx.set_materialize_grads(False)
        journey.send(held)
        return held[which].view_as(held[which]), held[which].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        journey: _Journey = ctx.journey
        if not journey.is_returning:  # nothing had come, so there was nothing to be learned about it
            journey.send_back([])
        return None, None, *journey.settle(grad, ctx.which)


class _Arrived(torch.autograd.Function):
    """Puts what was wanted together. What is learned about own rows, too, `_Began` adds up: of the few rows of a border
    no gradient as large as the tile is made.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, journey: _Journey) -> tuple[Tensor, ...]:
        ctx.journey = journey
        return journey.pieces()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.journey.send_back(grads)
        return grads[0].new_empty(0), None


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
