"""PyTorch's own Gloo and NCCL as transports.

Gloo blocks, as a transport should. NCCL only enqueues: what has been called is done in the order of the current CUDA
stream, which is what "done" means for a CUDA tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp, Store, Work
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from echelon.comm import algorithms
from echelon.comm.transports import Parcel, copy_to_self, exchange_rows

_OPERATIONS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
_GLOO_REDUCES = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})
_NCCL_REDUCES = _GLOO_REDUCES | {torch.float16, torch.bfloat16}
_EXCHANGE_TAG = 0


def gloo(store: Store, rank: int, size: int, timeout: timedelta) -> NativeTransport:
    """Gloo, for CPU tensors."""

    def group(name: str, rank: int, size: int) -> Any:
        return torch.distributed.ProcessGroupGloo(_apart(name, store), rank, size, timeout)

    return NativeTransport("gloo", group, rank, size)


def nccl(store: Store, rank: int, size: int, timeout: timedelta) -> NativeTransport:
    """NCCL, for CUDA tensors."""
    native = torch.distributed.ProcessGroupNCCL

    def group(name: str, rank: int, size: int) -> Any:
        options = native.Options()
        options._timeout = timeout
        return native(_apart(f"nccl-{name}", store), rank, size, options)

    return NativeTransport("nccl", group, rank, size)


def _apart(name: str, store: Store) -> Store:
    """The store, over a connection of its own: whoever waits in one keeps all others from it, and groups are opened by
    several threads, on no two ranks in the same order.
    """
    apart: Any = store
    return PrefixStore(f"{name}/", apart.clone())


@contextlib.contextmanager
def _grouped(group: Any) -> Any:
    """NCCL deadlocks on sends and receives that are not issued together."""
    group._group_start()
    try:
        yield
    finally:
        group._group_end()


class NativeTransport:
    """Collectives and messages over one of PyTorch's libraries. As with MPI, messages have a group of their own."""

    def __init__(self, name: str, group: Callable[[str, int, int], Any], rank: int, size: int) -> None:
        """`group` makes one of PyTorch's, by its name, this rank in it, and its size."""
        self.name, self.algorithm = name, ""
        self.rank, self.size = rank, size
        self.highest_tag = 2**31 - 1
        self._is_nccl = name == "nccl"
        self.reducible = _NCCL_REDUCES if self._is_nccl else _GLOO_REDUCES
        self._group = group
        self._collectives: Any = group("collectives", rank, size)
        self._messages: Any = None

    def open_messages(self) -> None:
        """Called by all ranks before the first message: Gloo's groups come to be only when all are there."""
        if self._messages is None:
            self._messages = self._group("messages", self.rank, self.size)

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        options = AllreduceOptions()
        options.reduceOp = _OPERATIONS[operation]
        self._collectives.allreduce([tensor], options).wait()

    def reduce(self, tensor: Tensor, operation: str, root: int) -> None:
        options = ReduceOptions()
        options.reduceOp, options.rootRank = _OPERATIONS[operation], root
        target = tensor if self.rank == root else tensor.clone()  # Gloo leaves partial sums in the other ranks' tensors
        self._collectives.reduce([target], options).wait()

    def reduce_scatter(self, output: Tensor, input: Tensor, operation: str) -> None:
        if self._is_nccl:
            options = ReduceScatterOptions()
            options.reduceOp = _OPERATIONS[operation]
            self._collectives._reduce_scatter_base(output.view(-1), input.view(-1), options).wait()
            return
        pieces = list(torch.tensor_split(input.view(-1), self.size))
        algorithms.reduce_scatter(self, output.view(-1), pieces, operation)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        self._collectives.broadcast([_as_bytes(tensor)], options).wait()

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        if self._is_nccl:
            self._collectives._allgather_base(_as_bytes(output), _as_bytes(input)).wait()
            return
        self.all_gather_uneven(output, input, [input.numel()] * self.size)

    def all_gather_uneven(self, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        pieces = output.view(-1).split(list(counts))
        self.exchange([(rank, input) for rank in range(self.size)], list(enumerate(pieces)))

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        exchange_rows(self, output, input)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        self.start_exchange(sends, receives)()

    def start_exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], object]:
        copy_to_self(self.rank, sends, receives)
        group = self._collectives
        with _grouped(group) if self._is_nccl else contextlib.nullcontext():
            works = [group.recv([_as_bytes(x)], rank, _EXCHANGE_TAG) for rank, x in self._for_others(receives)]
            works += [group.send([_as_bytes(x)], rank, _EXCHANGE_TAG) for rank, x in self._for_others(sends)]
        return partial(_wait_for, works)

    def part(self, ranks: Sequence[int]) -> NativeTransport:
        def group(name: str, rank: int, size: int) -> Any:
            return self._group(f"ranks {' '.join(map(str, ranks))}/{name}", rank, size)

        return NativeTransport(self.name, group, list(ranks).index(self.rank), len(ranks))

    def barrier(self, timeout: timedelta | None = None) -> None:
        options = BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        self._collectives.barrier(options).wait()

    def send(self, tensor: Tensor, rank: int, tag: int) -> NativeRequest:
        return NativeRequest(self._messages.send([_as_bytes(tensor)], rank, tag))

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> NativeRequest:
        view = [_as_bytes(tensor)]
        return NativeRequest(
            self._messages.recv_anysource(view, tag) if rank is None else self._messages.recv(view, rank, tag)
        )

    def close(self) -> None:
        """Drop the groups, which ends their threads: those of Gloo abort the process if they outlive Python."""
        for group in (self._collectives, self._messages) if self._is_nccl else ():
            if group is not None:
                group.shutdown()
        self._collectives = self._messages = None

    def _for_others(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        return [(rank, tensor) for rank, tensor in parcels if rank != self.rank and tensor.numel()]


class NativeRequest:
    """A work of PyTorch's own, waited for as a request.

    Gloo's messages become complete only inside a call of `wait`: to test one, a thread is left waiting for it.
    """

    __slots__ = ("_error", "_waiter", "_work")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._waiter: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self) -> None:
        if self._waiter is None:
            self._work.wait()
        else:
            self._waiter.join()
            self._raise()

    def test(self) -> bool:
        if self._waiter is None:
            if self._work.is_completed():
                self._work.wait()
                return True
            self._waiter = threading.Thread(target=self._wait_aside, name="echelon-message", daemon=True)
            self._waiter.start()
        if self._waiter.is_alive():
            return False
        self._raise()
        return True

    def source(self) -> int:
        return self._work._source_rank()

    def _wait_aside(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
