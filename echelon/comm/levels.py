"""Collectives in two levels: inside each node through memory that its ranks share, and between nodes by all ranks at
once, each for its own share, so that no byte crosses a link twice.

A tensor has a row for each rank of the group. To reduce: a node's ranks put their rows into the window; for every
destination one rank of the node adds up the node's rows and sends the sum there, where the nodes' sums are added. To
gather: every row goes to one rank of each other node, which puts it into the window for its neighbours. An all_reduce
is the one and then the other: a node sends 2(n−1)/n of the tensor, and receives as much.

Tensors go in chunks, each through the same stages, and a stage of one runs beside the next stage of the chunk before:
while one chunk is on the links, the next is added up. All ranks of a node take a step together, with one barrier. On
a single node there is nothing to send, and what is left is the shared-memory road.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from echelon.comm import algorithms
from echelon.comm.transports import HostTransport, Transport, parts
from echelon.comm.window import Window, open_window

_AREA = 2**21  # bytes of a chunk at most (benchmarks/shm.py)
_STREAM = 4  # chunks that a tensor makes at least where it crosses links, so that these are not idle meanwhile,
_SMALLEST = 2**20  # if they have this many bytes then (benchmarks/twolevel.py)
# What NumPy adds itself. Halves and smaller floats are summed in fp32, by `algorithms.accumulate`.
_NUMPY: dict[torch.dtype, type] = {
    getattr(torch, name): getattr(np, name)
    for name in (*(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float32", "float64")
} | {torch.complex64: np.complex64, torch.complex128: np.complex128}
Bytes = NDArray[np.uint8]
SumUp = Callable[[Sequence[Bytes], Bytes], None]


class Rows:
    """A part of every rank's row of a tensor: one behind the other in memory, or the columns of a matrix.

    In the window, rows always stand one behind the other. All of it is bytes, and NumPy's: its views cost a tenth of
    PyTorch's, and a chunk has many.
    """

    def __init__(self, memory: Bytes, item: int, ranks: int) -> None:
        """`item` is an element's size."""
        self.memory = memory
        if memory.ndim == 1:
            each, longer = divmod(len(memory) // item, ranks)  # as `torch.tensor_split` does
            self.cuts = [(rank * each + min(rank, longer)) * item for rank in range(ranks + 1)]
        else:
            self.cuts = [rank * memory.shape[1] for rank in range(ranks + 1)]

    def row(self, rank: int) -> Bytes:
        return self.memory[self.cuts[rank] : self.cuts[rank + 1]] if self.memory.ndim == 1 else self.memory[rank]

    def in_window(self, area: Bytes, rank: int) -> Bytes:
        return area[self.cuts[rank] : self.cuts[rank + 1]]

    def copy(self, area: Bytes, runs: Sequence[tuple[int, int]], into_window: bool) -> int:
        """Rows that follow each other, from the first of a run to before its end; returns the bytes."""
        copied = 0
        for first, end in runs:
            there = area[self.cuts[first] : self.cuts[end]]
            copied += len(there)
            if self.memory.ndim == 1:
                here = self.memory[self.cuts[first] : self.cuts[end]]
            else:
                here, there = self.memory[first:end], there.reshape(end - first, -1)
            np.copyto(*((there, here) if into_window else (here, there)))
        return copied


@dataclass(slots=True)
class Chunk:
    """A part of a tensor, on its way."""

    half: int
    given: Rows  # what is to be sent or summed
    taken: Rows  # where the result goes
    wait: Callable[[], object] = lambda: None
    by_node: dict[int, Bytes] = field(default_factory=dict)  # what has come, or will, from each for this rank
    held: list[Bytes] = field(default_factory=list)  # what is being sent


class Levels:
    """The algorithm, for one rank of a group whose rank `r` is on node `nodes[r]`.

    Every operation takes the transport that reaches the other nodes.
    """

    def __init__(self, host: HostTransport, inner: Transport, nodes: Sequence[int]) -> None:
        """Called by all ranks of the group. `inner` is between those of this rank's node alone."""
        self._me, self._size = host.rank, host.size
        self._members = {node: [rank for rank, on in enumerate(nodes) if on == node] for node in dict.fromkeys(nodes)}
        self._place = {rank: members.index(rank) for members in self._members.values() for rank in members}
        self._node = nodes[self._me]
        self._here = self._members[self._node]
        self._others = [node for node in self._members if node != self._node]
        self._inner = inner
        self._window: Window = open_window(inner, host, _AREA)
        self._chunks = 0  # so far: their halves alternate, also from one operation to the next
        self._written = 0
        everyone = range(self._size)
        # What this rank does for its node: adds up for these destinations, takes in these ranks' rows.
        self._destinations = [rank for rank in everyone if self._on(self._node, rank) == self._me]
        self._sources = [rank for rank in self._destinations if rank not in self._here]
        mine = {self._me, *self._sources}
        self._offered_runs = _runs([rank for rank in everyone if rank not in self._destinations])
        self._published_runs = _runs(sorted(mine)) if len(self._here) > 1 else []
        self._fetched_runs = _runs([rank for rank in everyone if rank not in mine])
        self.ways: dict[str, Callable[..., None]] = {
            "all_reduce": self.all_reduce,
            "reduce_scatter": self.reduce_scatter,
            "all_gather": self.all_gather,
            "all_to_all": self.all_to_all,
        }

    def written(self) -> int:
        """Bytes that this rank has put into the window so far."""
        return self._written

    def all_reduce(self, host: HostTransport, tensor: Tensor, operation: str) -> None:
        memory, item = _bytes(tensor), tensor.element_size()
        rows = [Rows(memory[part], item, self._size) for part in parts(len(memory), self._room(memory, item))]
        chunks = [self._chunk(part, part) for part in rows]
        sum_up = partial(_sum, operation, tensor.dtype)
        if self._others:
            send_sums, sum_nodes = partial(self._send_sums, host, sum_up), partial(self._sum_nodes, sum_up)
            send_row = partial(self._send_row, host)
            self._convey(chunks, [self._offer], [send_sums], [sum_nodes, send_row], [self._publish], [self._fetch])
        else:
            self._convey(chunks, [self._offer], [partial(self._sum_here, sum_up), self._publish], [self._fetch])

    def reduce_scatter(self, host: HostTransport, output: Tensor, input: Tensor, operation: str) -> None:
        rows, target = _bytes(input).reshape(self._size, -1), _bytes(output)
        same = as_strided(target, rows.shape, (0, 1))  # for every rank: only this one's is written
        chunks = self._columns(rows, same, input.element_size())
        sum_up = partial(_sum, operation, input.dtype)
        if self._others:
            sums = [partial(self._send_sums, host, sum_up)], [partial(self._sum_nodes, sum_up)]
            self._convey(chunks, [self._offer], *sums)
        else:
            self._convey(chunks, [self._offer], [partial(self._sum_here, sum_up)])

    def all_gather(self, host: HostTransport, output: Tensor, input: Tensor) -> None:
        rows, mine = _bytes(output).reshape(self._size, -1), _bytes(input)
        if input.data_ptr() != output.data_ptr() + self._me * input.nbytes:
            np.copyto(rows[self._me], mine)
        first = [[partial(self._send_row, host)]] if self._others else []
        self._convey(self._columns(rows, rows, input.element_size()), *first, [self._publish], [self._fetch])

    def all_to_all(self, host: HostTransport, output: Tensor, input: Tensor) -> None:
        there, back = (_bytes(tensor).reshape(self._size, -1) for tensor in (input, output))
        chunks = self._columns(there, back, input.element_size())
        last = [[self._unpack]] if self._others else []
        self._convey(chunks, [self._offer], [partial(self._deliver, host)], *last)

    def _on(self, node: int, rank: int) -> int:
        """Which rank of a node deals with another rank: there is always one, and they take turns."""
        members = self._members[node]
        return members[self._place[rank] % len(members)]

    def _room(self, memory: Bytes, item: int) -> int:
        """Bytes of a chunk."""
        most = self._window.area
        if self._others:
            most = min(most, max(memory.size // _STREAM, _SMALLEST))
        return most // item * item

    def _columns(self, given: Bytes, taken: Bytes, item: int) -> list[Chunk]:
        width = max(self._room(given, item) // self._size // item, 1) * item
        return [
            self._chunk(Rows(given[:, part], item, self._size), Rows(taken[:, part], item, self._size))
            for part in parts(given.shape[1], width)
        ]

    def _chunk(self, given: Rows, taken: Rows) -> Chunk:
        self._chunks += 1
        return Chunk(self._chunks % 2, given, taken)

    def _convey(self, chunks: list[Chunk], *stages: Sequence[Callable[[Chunk], None]]) -> None:
        """Chunk by chunk into the first stage, while those before are in later ones; a barrier after each step."""
        steps = len(chunks) + len(stages) - 1
        with np.errstate(all="ignore"):  # infinities are the caller's own
            for step in range(steps if chunks else 0):
                if step:
                    self._inner.barrier()
                for number, stage in enumerate(stages):
                    if 0 <= step - number < len(chunks):
                        for function in stage:
                            function(chunks[step - number])

    def _offered(self, chunk: Chunk, row: int) -> list[Bytes]:
        """A row of all ranks of this node, one's own first; those of others are in the window."""
        others = [self._window.of_rank[chunk.half][self._place[rank]] for rank in self._here if rank != self._me]
        return [chunk.given.row(row), *(chunk.given.in_window(area, row) for area in others)]

    def _offer(self, chunk: Chunk) -> None:
        area = self._window.of_rank[chunk.half][self._place[self._me]]
        self._written += chunk.given.copy(area, self._offered_runs, into_window=True)

    def _sum_here(self, sum_up: SumUp, chunk: Chunk) -> None:
        sum_up(self._offered(chunk, self._me), chunk.taken.row(self._me))

    def _send_sums(self, host: HostTransport, sum_up: SumUp, chunk: Chunk) -> None:
        sums = {rank: np.empty_like(chunk.given.row(rank)) for rank in self._destinations}
        for rank, target in sums.items():
            sum_up(self._offered(chunk, rank), target)
        chunk.by_node = {node: np.empty_like(sums[self._me]) for node in self._others}
        chunk.by_node[self._node] = sums.pop(self._me)
        self._exchange(host, chunk, list(sums.items()))

    def _sum_nodes(self, sum_up: SumUp, chunk: Chunk) -> None:
        chunk.wait()
        sum_up([chunk.by_node[node] for node in self._members], chunk.taken.row(self._me))

    def _exchange(self, host: HostTransport, chunk: Chunk, sends: list[tuple[int, Bytes]]) -> None:
        """Begin to send what others get from this rank, and to receive what it gets from each of the other nodes."""
        chunk.held = [memory for _, memory in sends]
        receives = [(self._on(node, self._me), chunk.by_node[node]) for node in self._others]
        chunk.wait = host.start_exchange(_parcels(sends), _parcels(receives))

    def _send_row(self, host: HostTransport, chunk: Chunk) -> None:
        row = chunk.taken.row(self._me)
        sends = [(self._on(node, self._me), row) for node in self._others]
        receives = [(rank, chunk.taken.row(rank)) for rank in self._sources]
        chunk.wait = host.start_exchange(_parcels(sends), _parcels(receives))

    def _publish(self, chunk: Chunk) -> None:
        chunk.wait()
        self._written += chunk.taken.copy(self._window.of_all[chunk.half], self._published_runs, into_window=True)

    def _fetch(self, chunk: Chunk) -> None:
        chunk.taken.copy(self._window.of_all[chunk.half], self._fetched_runs, into_window=False)

    def _deliver(self, host: HostTransport, chunk: Chunk) -> None:
        """To oneself what neighbours have for one; to others what all neighbours have for them, in one message."""
        in_order = [self._me, *(rank for rank in self._here if rank != self._me)]
        for rank, row in zip(in_order, self._offered(chunk, self._me), strict=True):
            np.copyto(chunk.taken.row(rank), row)
        if not self._others:
            return
        sends = []
        for rank in self._sources:
            rows = dict(zip(in_order, self._offered(chunk, rank), strict=True))
            sends.append((rank, np.concatenate([rows[near] for near in self._here])))
        mine = len(chunk.given.row(self._me))
        chunk.by_node = {node: np.empty(len(self._members[node]) * mine, np.uint8) for node in self._others}
        self._exchange(host, chunk, sends)

    def _unpack(self, chunk: Chunk) -> None:
        chunk.wait()
        for node, rows in chunk.by_node.items():
            for rank, row in zip(self._members[node], rows.reshape(len(self._members[node]), -1), strict=True):
                np.copyto(chunk.taken.row(rank), row)


def _bytes(tensor: Tensor) -> Bytes:
    """A tensor's memory; autograd has no part in it."""
    memory: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memory


def _parcels(rows: Sequence[tuple[int, Bytes]]) -> list[tuple[int, Tensor]]:
    return [(rank, torch.from_numpy(row)) for rank, row in rows]


def _sum(operation: str, dtype: torch.dtype, rows: Sequence[Bytes], out: Bytes) -> None:
    """Rows of one dtype, reduced into `out`, which may be the first of them."""
    combine, kind = algorithms.WITH_NUMPY[operation], _NUMPY.get(dtype)
    if not len(out):
        return
    if kind is None:
        tensors = [torch.from_numpy(row).view(dtype) for row in rows]
        algorithms.accumulate(tensors, operation, torch.from_numpy(out).view(dtype))
        return
    total: Any = out.view(kind)
    typed: list[Any] = [row.view(kind) for row in rows]
    if len(typed) == 1:
        np.copyto(total, typed[0])
    before = typed[0]
    for row in typed[1:]:
        combine(before, row, out=total)
        before = total


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Ranks that follow each other, as (first, one after the last)."""
    groups = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    return [(run[0], run[-1] + 1) for run in groups]
