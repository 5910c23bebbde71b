"""What ranks of a pipeline send each other: the values on the edges between links, and their gradients.

An edge goes straight from the crew that gives to the crew that takes, whatever stages lie between; within one crew
nothing is sent. Of images in tiles each rank sends what others need of its own: where the next stage has one rank,
tiles are put together there. What a crew has alike (and a gradient of which is the sum of its ranks') each rank takes
from one of the others. Messages begin at once and are waited for when they are needed. Their shapes follow from those
of the microbatch's arguments, which every rank has: the first run with such arguments tells them, later ones know.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.models.chain import Edge, Given, Value
from echelon.parallel.pipeline.crews import Crew
from echelon.parallel.spatial.regrid import Box, moves, tile_sizes
from echelon.parallel.spatial.tiles import Ground, Tile, Whole, plain

_TAGS = 2**15  # that MPI has at least
_HEADER = 256  # numbers that tell what a value is made of
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)

Signature = tuple[Any, ...]
Message = tuple[Tensor, int]  # with the other rank


class Kind(NamedTuple):
    """What one tensor of a value is and, of a tile, how many rows and columns the whole has. The shape is that of the
    whole, unless tiles go to the same tiles, each in a pipeline of its own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    image: tuple[int, int] | None = None


@dataclass(frozen=True)
class Kinds:
    """What a value is: a tensor, or a tuple of some."""

    tensors: tuple[Kind, ...]
    is_tuple: bool

    def header(self, edge: Edge) -> Tensor:
        numbers = [int(self.is_tuple), len(self.tensors)]
        for shape, dtype, has_gradient, image in self.tensors:
            numbers += [_DTYPES.index(dtype), int(has_gradient), int(image is not None), *(image or (0, 0))]
            numbers += [len(shape), *shape]
        if len(numbers) > _HEADER:
            raise ValueError(f"what link {edge[0]} gives to {edge[1]} has {len(self.tensors)} tensors: join some")
        return torch.tensor(numbers + [0] * (_HEADER - len(numbers)))

    @staticmethod
    def read(header: Tensor) -> Kinds:
        is_tuple, count, *numbers = header.tolist()
        tensors = []
        for _ in range(count):
            dtype, has_gradient, is_tile, rows, columns, dims, *numbers = numbers
            image = (rows, columns) if is_tile else None
            tensors.append(Kind(tuple(numbers[:dims]), _DTYPES[dtype], bool(has_gradient), image))
            numbers = numbers[dims:]
        return Kinds(tuple(tensors), bool(is_tuple))


def kinds_of(value: Value, crew: Crew, is_tiled: bool) -> Kinds:
    """Of what a rank of a crew gives. An image that one rank has as a whole is a tile, too."""
    kinds = []
    for x in parts_of(value):
        image = None
        if isinstance(x, Tile) or (not is_tiled and x.dim() == 4):
            image = x.shape[-2], x.shape[-1]  # of a tile: those of the whole
        shape = x.shape if crew.tiles != (1, 1) else plain(x).shape
        kinds.append(Kind(tuple(shape), x.dtype, x.requires_grad, image))
    return Kinds(tuple(kinds), isinstance(value, tuple))


def shown(value: Value, kinds: Kinds, ground: Ground | None) -> Value:
    """What arrived, as a model takes it that computes tiles on this ground, or whole images."""
    if ground is None:
        return value
    tensors = tuple(
        Tile.of(x, Whole(kind.image, ground)) if kind.image is not None else x
        for x, kind in zip(parts_of(value), kinds.tensors, strict=True)
    )
    return tensors if isinstance(value, tuple) else tensors[0]


def parts_of(value: Value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def signature(given: Given, training: bool) -> Signature:
    """What the shapes of all values depend on."""
    items = list(given.items() if isinstance(given, Mapping) else enumerate(given))
    for name, x in items:
        if not isinstance(x, Hashable):
            raise TypeError(
                f"argument {name!r} of a microbatch is a {type(x).__name__}, and shapes may depend on it: "
                "give tensors, or what does not change (numbers, words, tuples)"
            )
    kinds = [(name, (*x.shape, x.dtype) if isinstance(x, Tensor) else x) for name, x in items]
    return (training, torch.is_grad_enabled(), *kinds)


@dataclass(frozen=True)
class Route:
    """From the crew that gives to the crew that takes, as one of their ranks sees it."""

    source: Crew
    target: Crew

    @property
    def _cuts(self) -> bool:
        """Whether any of both has tiles; where each rank has its own pipeline, they are what they were."""
        return (self.source.tiles, self.target.tiles) != ((1, 1), (1, 1))

    def contact(self, target: int) -> int:
        """Which of the source's ranks tells one of the target's of what is coming, and gives it what all have alike."""
        return target % len(self.source.ranks)

    def parcels(self, kind: Kind) -> dict[tuple[int, int], tuple[Box, Box] | None]:
        """Between which of both crews' ranks a tensor goes, and which part of it; None: all."""
        if kind.image is not None and self._cuts:
            return dict(moves(kind.image, self.source.tiles, self.target.tiles))
        return {(self.contact(target), target): None for target in range(len(self.target.ranks))}

    def payload(self, kinds: Kinds, rank: int, *, back: bool = False) -> int:
        """Bytes of what a rank of the source sends or, `back`, a rank of the target, of the gradient."""
        crew = self.target if back else self.source
        if self.source == self.target or rank not in crew.ranks:
            return 0
        me, total = crew.ranks.index(rank), 0
        for kind in kinds.tensors if not back else [each for each in kinds.tensors if each.has_gradient]:
            for (source, target), boxes in self.parcels(kind).items():
                if (target if back else source) == me:
                    total += math.prod(_sizes(kind.shape, boxes and boxes[0])) * kind.dtype.itemsize
        return total

    def shape(self, kind: Kind, crew: Crew, which: int) -> tuple[int, ...]:
        """Of what a rank of one of the crews has."""
        if kind.image is None or not self._cuts:
            return kind.shape
        return (*kind.shape[:-2], *tile_sizes(kind.image, crew.tiles, which))


@dataclass
class _Parcel:
    """A part of a tensor, under way to here."""

    number: int  # of the tensor
    memory: Tensor
    box: Box | None
    work: Any


@dataclass
class _Arriving:
    """A value under way to here."""

    kinds: Kinds | None
    header: Tensor | None = None
    work: Any = None  # of the header
    tensors: list[Tensor] = field(default_factory=list)
    parcels: list[_Parcel] = field(default_factory=list)


class Mail:
    """Of one rank of a pipeline's group."""

    def __init__(self, group: dist.ProcessGroup, edges: Sequence[Edge], device: torch.device) -> None:
        self._group, self._edges, self._device = group, {edge: number for number, edge in enumerate(edges)}, device
        self._me = dist.get_rank(group)
        self._known: dict[tuple[Signature, Edge], Kinds] = {}
        self._told: set[Signature] = set()  # in runs before this one
        self._arriving: dict[tuple[Edge, int, bool], _Arriving] = {}
        self._here: dict[tuple[Edge, int, bool], tuple[Kinds, Value]] = {}  # from this crew to itself
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, edge: Edge, microbatch: int, told: Signature, value: Value, kinds: Kinds, route: Route) -> None:
        """Begin to send what an edge carries."""
        if route.source == route.target:
            self._here[edge, microbatch, False] = kinds, value
            return
        tag, known = self._tag(edge, microbatch, False), self._known.get((told, edge))
        me = route.source.ranks.index(self._me)
        if told not in self._told:
            for which, rank in enumerate(route.target.ranks):
                if route.contact(which) == me:
                    self._post(kinds.header(edge), rank, tag)
            self._known[told, edge] = kinds
        elif kinds != known:
            raise ValueError(
                f"link {edge[0]} gave {known} for arguments of these shapes before, and now {kinds}: what shapes "
                "depend on must be in the shapes of a microbatch's arguments"
            )
        for tensor, kind in zip(parts_of(value), kinds.tensors, strict=True):
            for (source, target), boxes in route.parcels(kind).items():
                if source == me:
                    part = _part(tensor.detach(), boxes[0] if boxes else None)
                    self._post(part, route.target.ranks[target], tag)

    def receive(self, edge: Edge, microbatch: int, told: Signature, route: Route) -> None:
        """Begin to receive it."""
        if route.source == route.target:
            return
        tag = self._tag(edge, microbatch, False)
        if told in self._told:
            arriving = self._begin(self._known[told, edge], route, tag)
        else:
            contact = route.source.ranks[route.contact(route.target.ranks.index(self._me))]
            header = torch.empty(_HEADER, dtype=torch.int64)
            work = dist.irecv(header, group=self._group, group_src=contact, tag=tag)
            arriving = _Arriving(None, header, work)
        self._arriving[edge, microbatch, False] = arriving

    def take(self, edge: Edge, microbatch: int, told: Signature, route: Route) -> tuple[Value, Kinds]:
        """Wait for what an edge brings here, and what it is; its tensors are leaves, and have gradients if the original
        ones do.
        """
        if route.source == route.target:
            kinds, value = self._here.pop((edge, microbatch, False))
            tensors = tuple(x.detach().requires_grad_(x.requires_grad) for x in parts_of(value))
            return tensors if isinstance(value, tuple) else tensors[0], kinds
        arriving = self._arriving.pop((edge, microbatch, False))
        if arriving.header is not None:
            arriving.work.wait()
            self._known[told, edge] = Kinds.read(arriving.header)
            arriving = self._begin(self._known[told, edge], route, self._tag(edge, microbatch, False))
        _wait(arriving)
        assert arriving.kinds is not None
        pairs = zip(arriving.tensors, arriving.kinds.tensors, strict=True)
        tensors = tuple(x.requires_grad_(kind.has_gradient and torch.is_grad_enabled()) for x, kind in pairs)
        return tensors if arriving.kinds.is_tuple else tensors[0], arriving.kinds

    def send_gradient(self, edge: Edge, microbatch: int, value: Value, kinds: Kinds, route: Route) -> None:
        """Begin to send back the gradient of what was taken."""
        if route.source == route.target:
            self._here[edge, microbatch, True] = kinds, value
            return
        me, tag = route.target.ranks.index(self._me), self._tag(edge, microbatch, True)
        for tensor, kind in zip(parts_of(value), kinds.tensors, strict=True):
            if not tensor.requires_grad:
                continue
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for (source, target), boxes in route.parcels(kind).items():
                if target == me:
                    self._post(_part(gradient, boxes[1] if boxes else None), route.source.ranks[source], tag)

    def receive_gradient(self, edge: Edge, microbatch: int, told: Signature, route: Route) -> None:
        """Begin to receive the gradient of what is sent, if it is known what that is."""
        if route.source != route.target and (told, edge) in self._known:
            kinds = Kinds(tuple(kind for kind in self._known[told, edge].tensors if kind.has_gradient), True)
            tag = self._tag(edge, microbatch, True)
            self._arriving[edge, microbatch, True] = self._begin(kinds, route, tag, back=True)

    def take_gradient(self, edge: Edge, microbatch: int, told: Signature, route: Route) -> list[Tensor | None]:
        """Wait for it: a gradient for each tensor that has one."""
        if route.source == route.target:
            _, value = self._here.pop((edge, microbatch, True))
            return [tensor.grad for tensor in parts_of(value) if tensor.requires_grad]
        if (edge, microbatch, True) not in self._arriving:
            self.receive_gradient(edge, microbatch, told, route)
        arriving = self._arriving.pop((edge, microbatch, True))
        _wait(arriving)
        return [*arriving.tensors]

    def finish(self, signatures: Sequence[Signature]) -> None:
        """At the end of a run: all that was sent has arrived, and its shapes are known."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
        self._told |= set(signatures)

    def _begin(self, kinds: Kinds, route: Route, tag: int, back: bool = False) -> _Arriving:
        """Receive a value, or back from whoever took it its gradient."""
        mine, theirs = (route.source, route.target) if back else (route.target, route.source)
        me, arriving = mine.ranks.index(self._me), _Arriving(kinds)
        for number, kind in enumerate(kinds.tensors):
            shape = route.shape(kind, mine, me)
            parcels = [
                ((target, boxes and boxes[0]) if back else (source, boxes and boxes[1]))
                for (source, target), boxes in route.parcels(kind).items()
                if (source if back else target) == me
            ]
            alone = len(parcels) == 1 and (parcels[0][1] is None or parcels[0][1].sizes == shape[-2:])
            make = torch.empty if alone else torch.zeros
            tensor = make(shape, dtype=kind.dtype, device=self._device)
            arriving.tensors.append(tensor)
            for other, box in parcels:
                memory = tensor if alone else torch.empty(_sizes(shape, box), dtype=kind.dtype, device=self._device)
                work = dist.irecv(memory, group=self._group, group_src=theirs.ranks[other], tag=tag)
                arriving.parcels.append(_Parcel(number, memory, box, work))
        return arriving

    def _post(self, tensor: Tensor, rank: int, tag: int) -> None:
        tensor = tensor.contiguous()
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        self._sent.append((dist.isend(tensor, group=self._group, group_dst=rank, tag=tag), tensor))

    def _tag(self, edge: Edge, microbatch: int, is_gradient: bool) -> int:
        """Messages of one edge and kind keep their order, so that tags may come again."""
        return ((microbatch * len(self._edges) + self._edges[edge]) * 2 + is_gradient) % _TAGS


def exchange(group: dist.ProcessGroup, sent: Sequence[Message], received: Sequence[Message]) -> None:
    """Send and receive tensors, each to or from a rank of the group; in one order between any two ranks."""
    works: list[Any] = [dist.irecv(tensor, group=group, group_src=rank) for tensor, rank in received]
    works += [dist.isend(tensor, group=group, group_dst=rank) for tensor, rank in sent]
    for work in works:
        work.wait()


def check_value(value: Any, edge: Edge) -> None:
    if not all(isinstance(each, Tensor) for each in parts_of(value)):
        raise TypeError(f"link {edge[0]} gives {_what(value)} to {edge[1]}: give a tensor, or a tuple of tensors")


def _what(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_what, value))})"
    return f"a {type(value).__name__}"


def _part(tensor: Tensor, box: Box | None) -> Tensor:
    return tensor if box is None else tensor[..., box.rows, box.columns]


def _sizes(shape: tuple[int, ...], box: Box | None) -> tuple[int, ...]:
    return shape if box is None else (*shape[:-2], *box.sizes)


def _wait(arriving: _Arriving) -> None:
    """Until all parts are here; what comes more than once adds up."""
    for parcel in arriving.parcels:
        parcel.work.wait()
        tensor = arriving.tensors[parcel.number]
        if parcel.memory is not tensor:
            _part(tensor, parcel.box).add_(parcel.memory)
