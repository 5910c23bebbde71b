"""What ranks of a pipeline send each other: the values on the edges between links, and their gradients.

An edge goes straight from the rank that gives to the rank that takes, whatever stages lie between; on one rank nothing
is sent. Messages begin at once and are waited for when they are needed. Their shapes follow from those of the
microbatch's arguments, which every rank has: the first run with such arguments tells them, later ones know.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.models.chain import Edge, Given, Value

_TAGS = 2**15  # that MPI has at least
_HEADER = 256  # numbers that tell what a value is made of
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)

Signature = tuple[Any, ...]
Message = tuple[Tensor, int]  # with the other rank


class Kind(NamedTuple):
    """What one tensor of a value is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


@dataclass(frozen=True)
class Kinds:
    """What a value is: a tensor, or a tuple of some."""

    tensors: tuple[Kind, ...]
    is_tuple: bool

    def header(self, edge: Edge) -> Tensor:
        numbers = [int(self.is_tuple), len(self.tensors)]
        for shape, dtype, has_gradient in self.tensors:
            numbers += [_DTYPES.index(dtype), int(has_gradient), len(shape), *shape]
        if len(numbers) > _HEADER:
            raise ValueError(f"what link {edge[0]} gives to {edge[1]} has {len(self.tensors)} tensors: join some")
        return torch.tensor(numbers + [0] * (_HEADER - len(numbers)))

    @staticmethod
    def read(header: Tensor) -> Kinds:
        is_tuple, count, *numbers = header.tolist()
        tensors = []
        for _ in range(count):
            dtype, has_gradient, dims, *numbers = numbers
            tensors.append(Kind(tuple(numbers[:dims]), _DTYPES[dtype], bool(has_gradient)))
            numbers = numbers[dims:]
        return Kinds(tuple(tensors), bool(is_tuple))


def kinds_of(value: Value) -> Kinds:
    tensors = parts_of(value)
    return Kinds(tuple(Kind(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors), isinstance(value, tuple))


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


@dataclass
class _Arriving:
    """A value under way to here."""

    kinds: Kinds | None
    header: Tensor | None
    tensors: list[Tensor]
    works: list[Any]


class Mail:
    """Of one rank of a pipeline's group."""

    def __init__(self, group: dist.ProcessGroup, edges: Sequence[Edge], device: torch.device) -> None:
        self._group, self._edges, self._device = group, {edge: number for number, edge in enumerate(edges)}, device
        self._me = dist.get_rank(group)
        self._known: dict[tuple[Signature, Edge], Kinds] = {}
        self._told: set[Signature] = set()  # in runs before this one
        self._arriving: dict[tuple[Edge, int, bool], _Arriving] = {}
        self._here: dict[tuple[Edge, int, bool], Value] = {}  # from this rank to itself
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, edge: Edge, microbatch: int, told: Signature, value: Value, rank: int) -> None:
        """Begin to send what an edge carries."""
        if not all(isinstance(each, Tensor) for each in parts_of(value)):
            raise TypeError(f"link {edge[0]} gives {_what(value)} to {edge[1]}: give a tensor, or a tuple of tensors")
        if rank == self._me:
            self._here[edge, microbatch, False] = value
            return
        kinds, known = kinds_of(value), self._known.get((told, edge))
        if told not in self._told:
            self._post(kinds.header(edge), rank, self._tag(edge, microbatch, False))
            self._known[told, edge] = kinds
        elif kinds != known:
            raise ValueError(
                f"link {edge[0]} gave {known} for arguments of these shapes before, and now {kinds}: what shapes "
                "depend on must be in the shapes of a microbatch's arguments"
            )
        for tensor in parts_of(value):
            self._post(tensor.detach(), rank, self._tag(edge, microbatch, False))

    def receive(self, edge: Edge, microbatch: int, told: Signature, rank: int) -> None:
        """Begin to receive it."""
        if rank == self._me:
            return
        tag = self._tag(edge, microbatch, False)
        if told in self._told:
            arriving = self._begin(self._known[told, edge], rank, tag)
        else:
            header = torch.empty(_HEADER, dtype=torch.int64)
            work = dist.irecv(header, group=self._group, group_src=rank, tag=tag)
            arriving = _Arriving(None, header, [], [work])
        self._arriving[edge, microbatch, False] = arriving

    def take(self, edge: Edge, microbatch: int, told: Signature, rank: int) -> Value:
        """Wait for what an edge brings here; its tensors are leaves, and have gradients if the original ones do."""
        if rank == self._me:
            value = self._here.pop((edge, microbatch, False))
            tensors = tuple(x.detach().requires_grad_(x.requires_grad) for x in parts_of(value))
            return tensors if isinstance(value, tuple) else tensors[0]
        arriving = self._arriving.pop((edge, microbatch, False))
        _wait(arriving)
        if arriving.header is not None:
            kinds = Kinds.read(arriving.header)
            self._known[told, edge] = kinds
            arriving = self._begin(kinds, rank, self._tag(edge, microbatch, False))
            _wait(arriving)
        assert arriving.kinds is not None
        pairs = zip(arriving.tensors, arriving.kinds.tensors, strict=True)
        tensors = tuple(x.requires_grad_(kind.has_gradient and torch.is_grad_enabled()) for x, kind in pairs)
        return tensors if arriving.kinds.is_tuple else tensors[0]

    def send_gradient(self, edge: Edge, microbatch: int, value: Value, rank: int) -> None:
        """Begin to send back the gradient of what was taken."""
        if rank == self._me:
            self._here[edge, microbatch, True] = value
            return
        for tensor in parts_of(value):
            if tensor.requires_grad:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._post(gradient, rank, self._tag(edge, microbatch, True))

    def receive_gradient(self, edge: Edge, microbatch: int, told: Signature, rank: int) -> None:
        """Begin to receive the gradient of what is sent, if it is known what that is."""
        if rank != self._me and (told, edge) in self._known:
            kinds = Kinds(tuple(kind for kind in self._known[told, edge].tensors if kind.has_gradient), True)
            self._arriving[edge, microbatch, True] = self._begin(kinds, rank, self._tag(edge, microbatch, True))

    def take_gradient(self, edge: Edge, microbatch: int, told: Signature, rank: int) -> list[Tensor | None]:
        """Wait for it: a gradient for each tensor that has one."""
        if rank == self._me:
            value = self._here.pop((edge, microbatch, True))
            return [tensor.grad for tensor in parts_of(value) if tensor.requires_grad]
        if (edge, microbatch, True) not in self._arriving:
            self.receive_gradient(edge, microbatch, told, rank)
        arriving = self._arriving.pop((edge, microbatch, True))
        _wait(arriving)
        return [*arriving.tensors]

    def finish(self, signatures: Sequence[Signature]) -> None:
        """At the end of a run: all that was sent has arrived, and its shapes are known."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
        self._told |= set(signatures)

    def _begin(self, kinds: Kinds, rank: int, tag: int) -> _Arriving:
        tensors = [torch.empty(kind.shape, dtype=kind.dtype, device=self._device) for kind in kinds.tensors]
        works = [dist.irecv(tensor, group=self._group, group_src=rank, tag=tag) for tensor in tensors]
        return _Arriving(kinds, None, tensors, works)

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


def _what(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_what, value))})"
    return f"a {type(value).__name__}"


def _wait(arriving: _Arriving) -> None:
    for work in arriving.works:
        work.wait()
