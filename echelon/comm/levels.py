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

import torch
from torch import Tensor

from echelon.comm import algorithms
from echelon.comm.transports import HostTransport, Transport, parts
from echelon.comm.window import Window, open_window

_AREA = 2**20  # bytes of a chunk inside a node (benchmarks/shm.py)
_AREA_BETWEEN = 2**21  # and where it also crosses links (benchmarks/twolevel.py)
_ALIGNMENT = 64


@dataclass(slots=True)
class Chunk:
    """A part of every row, on its way."""

    half: int
    given: Sequence[Tensor]  # by rank: what is to be sent or summed
    taken: Sequence[Tensor]  # by rank: where the result goes
    starts: list[int]  # of the rows in the window
    wait: Callable[[], object] = lambda: None
    by_node: dict[int, Tensor] = field(default_factory=dict)  # what has come, or will, from each for this rank
    held: list[Tensor] = field(default_factory=list)  # what is being sent


class Levels:
    """The algorithm, for one rank of a group whose rank `r` is on node `nodes[r]`.

    Every operation takes the transport that reaches the other nodes.
    """

    def __init__(self, host: HostTransport, nodes: Sequence[int]) -> None:
        """Called by all ranks of the group."""
        self._me, self._size = host.rank, host.size
        self._members = {node: [rank for rank, on in enumerate(nodes) if on == node] for node in dict.fromkeys(nodes)}
        self._place = {rank: members.index(rank) for members in self._members.values() for rank in members}
        self._node = nodes[self._me]
        self._here = self._members[self._node]
        self._others = [node for node in self._members if node != self._node]
        self._inner: Transport = host if not self._others else host.part(self._here)
        self._window: Window = open_window(self._inner, _AREA_BETWEEN if self._others else _AREA)
        self._chunks = 0  # so far: their halves alternate, also from one operation to the next
        self._written = 0
        # What this rank does for its node: sums for these destinations, takes in these ranks' rows.
        self._destinations = [rank for rank in range(self._size) if self._on(self._node, rank) == self._me]
        self._sources = [
            rank for rank in range(self._size) if rank not in self._here and self._on(self._node, rank) == self._me
        ]
        self.ways: dict[str, Callable[..., None]] = {
            "all_reduce": self.all_reduce,
            "reduce_scatter": self.reduce_scatter,
            "all_gather": self.all_gather,
            "all_to_all": self.all_to_all,
        }

    def written(self) -> int:
        """Bytes that this rank has put into the window so far."""
        return self._written

    def close(self) -> None:
        """Let go of the memory; the last rank to do so frees it."""
        del self._window
        if self._others:
            self._inner.close()

    @torch.inference_mode()
    def all_reduce(self, host: HostTransport, tensor: Tensor, operation: str) -> None:
        flat = tensor.detach().view(-1)
        pieces = parts(flat.numel(), self._room() // flat.element_size())
        chunks = [self._chunk(rows, rows) for rows in (torch.tensor_split(flat[piece], self._size) for piece in pieces)]
        if self._others:
            send_sums, sum_nodes = partial(self._send_sums, host, operation), partial(self._sum_nodes, operation)
            send_row = partial(self._send_row, host)
            self._convey(chunks, [self._offer], [send_sums], [sum_nodes, send_row], [self._publish], [self._fetch])
        else:
            self._convey(chunks, [self._offer], [partial(self._sum_here, operation), self._publish], [self._fetch])

    @torch.inference_mode()
    def reduce_scatter(self, host: HostTransport, output: Tensor, input: Tensor, operation: str) -> None:
        rows, target = input.detach().view(self._size, -1), output.detach().view(-1)
        chunks = [
            self._chunk(list(rows[:, columns]), [target[columns]] * self._size)
            for columns in parts(target.numel(), self._room() // self._size // target.element_size())
        ]
        if self._others:
            sums = [partial(self._send_sums, host, operation)], [partial(self._sum_nodes, operation)]
            self._convey(chunks, [self._offer], *sums)
        else:
            self._convey(chunks, [self._offer], [partial(self._sum_here, operation)])

    @torch.inference_mode()
    def all_gather(self, host: HostTransport, output: Tensor, input: Tensor) -> None:
        rows, mine = output.detach().view(self._size, -1), input.detach().view(-1)
        if mine.data_ptr() != rows[self._me].data_ptr():
            rows[self._me].copy_(mine)
        chunks = [
            self._chunk([], list(rows[:, columns]))
            for columns in parts(mine.numel(), self._room() // self._size // mine.element_size())
        ]
        first = [[partial(self._send_row, host)]] if self._others else []
        self._convey(chunks, *first, [self._publish], [self._fetch])

    @torch.inference_mode()
    def all_to_all(self, host: HostTransport, output: Tensor, input: Tensor) -> None:
        there, back = input.detach().view(self._size, -1), output.detach().view(self._size, -1)
        chunks = [
            self._chunk(list(there[:, columns]), list(back[:, columns]))
            for columns in parts(there.shape[1], self._room() // self._size // there.element_size())
        ]
        last = [[self._unpack]] if self._others else []
        self._convey(chunks, [self._offer], [partial(self._deliver, host)], *last)

    def _on(self, node: int, rank: int) -> int:
        """Which rank of a node deals with another rank: there is always one, and they take turns."""
        members = self._members[node]
        return members[self._place[rank] % len(members)]

    def _room(self) -> int:
        """Bytes that the rows of a chunk may have together."""
        return self._window.area - self._size * _ALIGNMENT

    def _chunk(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> Chunk:
        self._chunks += 1
        starts, start = [], 0
        for row in given or taken:
            starts.append(start)
            start += -(-row.nbytes // _ALIGNMENT) * _ALIGNMENT
        return Chunk(self._chunks % 2, given, taken, starts)

    def _convey(self, chunks: list[Chunk], *stages: Sequence[Callable[[Chunk], None]]) -> None:
        """Chunk by chunk into the first stage, while those before are in later ones; a barrier after each step."""
        steps = len(chunks) + len(stages) - 1
        for step in range(steps if chunks else 0):
            if step:
                self._inner.barrier()
            for number, stage in enumerate(stages):
                if 0 <= step - number < len(chunks):
                    for function in stage:
                        function(chunks[step - number])

    def _offered(self, chunk: Chunk, rank: int, row: int) -> Tensor:
        """A row of a rank of this node, in the window; one's own is not there."""
        if rank == self._me:
            return chunk.given[row]
        return _at(self._window.of_rank(chunk.half, self._place[rank]), chunk.starts[row], chunk.given[row])

    def _offer(self, chunk: Chunk) -> None:
        area = self._window.of_rank(chunk.half, self._place[self._me])
        for rank, row in enumerate(chunk.given):
            if self._on(self._node, rank) != self._me:
                _at(area, chunk.starts[rank], row).copy_(row)
                self._written += row.nbytes

    def _sum_here(self, operation: str, chunk: Chunk) -> None:
        offered = [self._offered(chunk, rank, self._me) for rank in self._here]
        algorithms.accumulate(offered, operation, chunk.taken[self._me])

    def _send_sums(self, host: HostTransport, operation: str, chunk: Chunk) -> None:
        sums = {rank: torch.empty_like(chunk.given[rank]) for rank in self._destinations}
        for rank, target in sums.items():
            algorithms.accumulate([self._offered(chunk, near, rank) for near in self._here], operation, target)
        chunk.by_node = {node: torch.empty_like(chunk.given[self._me]) for node in self._others}
        chunk.by_node[self._node] = sums.pop(self._me)
        chunk.held = list(sums.values())
        chunk.wait = host.start_exchange(
            list(sums.items()), [(self._on(node, self._me), chunk.by_node[node]) for node in self._others]
        )

    def _sum_nodes(self, operation: str, chunk: Chunk) -> None:
        chunk.wait()
        algorithms.accumulate([chunk.by_node[node] for node in self._members], operation, chunk.taken[self._me])

    def _send_row(self, host: HostTransport, chunk: Chunk) -> None:
        row = chunk.taken[self._me]
        chunk.wait = host.start_exchange(
            [(self._on(node, self._me), row) for node in self._others],
            [(rank, chunk.taken[rank]) for rank in self._sources],
        )

    def _publish(self, chunk: Chunk) -> None:
        chunk.wait()
        area, read = self._window.of_all(chunk.half), len(self._here) > 1
        for rank in (self._me, *self._sources) if read else ():
            _at(area, chunk.starts[rank], chunk.taken[rank]).copy_(chunk.taken[rank])
            self._written += chunk.taken[rank].nbytes

    def _fetch(self, chunk: Chunk) -> None:
        area, known = self._window.of_all(chunk.half), {self._me, *self._sources}
        for rank, row in enumerate(chunk.taken):
            if rank not in known:
                row.copy_(_at(area, chunk.starts[rank], row))

    def _deliver(self, host: HostTransport, chunk: Chunk) -> None:
        """To oneself what neighbours have for one; to others what all neighbours have for them, in one message."""
        for rank in self._here:
            chunk.taken[rank].copy_(self._offered(chunk, rank, self._me))
        if not self._others:
            return
        sends = [
            (rank, torch.cat([self._offered(chunk, near, rank) for near in self._here]))
            for rank in self._destinations
            if rank != self._me
        ]
        row = chunk.given[self._me]
        chunk.by_node = {node: row.new_empty(len(self._members[node]) * len(row)) for node in self._others}
        chunk.held = [tensor for _, tensor in sends]
        chunk.wait = host.start_exchange(
            sends, [(self._on(node, self._me), chunk.by_node[node]) for node in self._others]
        )

    def _unpack(self, chunk: Chunk) -> None:
        chunk.wait()
        for node, rows in chunk.by_node.items():
            for rank, row in zip(self._members[node], rows.view(len(self._members[node]), -1), strict=True):
                chunk.taken[rank].copy_(row)


def _at(area: Tensor, start: int, like: Tensor) -> Tensor:
    """A stretch of the window, of a row's dtype and length."""
    return area[start : start + like.nbytes].view(like.dtype)
