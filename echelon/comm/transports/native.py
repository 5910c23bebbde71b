"""PyTorch's own Gloo as a transport, for ranks that have no MPI world (torchrun)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, ReduceOp, Store, Work
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOptions

from echelon.comm import algorithms
from echelon.comm.transports import Parcel, copy_to_self

_OPERATIONS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
_EXCHANGE_TAG = 0


class GlooTransport:
    """Collectives and messages over Gloo. As with MPI, messages have a group of their own."""

    name = "gloo"
    reducible = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._group: Any = ProcessGroupGloo(torch.distributed.PrefixStore("collectives/", store), rank, size, timeout)
        self._messages: Any = ProcessGroupGloo(torch.distributed.PrefixStore("messages/", store), rank, size, timeout)
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        options = AllreduceOptions()
        options.reduceOp = _OPERATIONS[operation]
        self._group.allreduce([tensor], options).wait()

    def reduce(self, tensor: Tensor, operation: str, root: int) -> None:
        options = ReduceOptions()
        options.reduceOp, options.rootRank = _OPERATIONS[operation], root
        target = tensor if self.rank == root else tensor.clone()  # Gloo leaves partial sums in the other ranks' tensors
        self._group.reduce([target], options).wait()

    def reduce_scatter(self, output: Tensor, input: Tensor, operation: str) -> None:
        pieces = list(torch.tensor_split(input.view(-1), self.size))
        algorithms.reduce_scatter(self, output.view(-1), pieces, operation)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([_as_bytes(tensor)], options).wait()

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self.all_gather_uneven(output, input, [input.numel()] * self.size)

    def all_gather_uneven(self, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        pieces = output.view(-1).split(list(counts))
        self.exchange([(rank, input) for rank in range(self.size)], list(enumerate(pieces)))

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        self.exchange(
            list(enumerate(input.view(-1).chunk(self.size))), list(enumerate(output.view(-1).chunk(self.size)))
        )

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        copy_to_self(self.rank, sends, receives)
        works = [
            self._group.recv([_as_bytes(t)], rank, _EXCHANGE_TAG)
            for rank, t in receives
            if rank != self.rank and t.numel()
        ]
        works += [
            self._group.send([_as_bytes(t)], rank, _EXCHANGE_TAG)
            for rank, t in sends
            if rank != self.rank and t.numel()
        ]
        for work in works:
            work.wait()

    def barrier(self) -> None:
        self._group.barrier().wait()

    def send(self, tensor: Tensor, rank: int, tag: int) -> GlooRequest:
        return GlooRequest(self._messages.send([_as_bytes(tensor)], rank, tag))

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> GlooRequest:
        view = [_as_bytes(tensor)]
        return GlooRequest(
            self._messages.recv_anysource(view, tag) if rank is None else self._messages.recv(view, rank, tag)
        )

    def close(self) -> None:
        """Gloo closes its connections when its groups are dropped."""


class GlooRequest:
    """A Gloo work, waited for as a request."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def test(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True

    def source(self) -> int:
        return self._work._source_rank()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
