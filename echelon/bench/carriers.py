"""Who is asked to move a buffer: `torch.distributed` over a group of any backend, or mpi4py itself.

Every method gets its buffers once and returns the call that is timed, with nothing of ours between clock and library.
Where `nonblocking` is set, that call returns at once, with what is to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch.distributed import ReduceOp

from echelon.bench.buffers import Buffer
from echelon.comm.torch_compat import newest

if TYPE_CHECKING:
    from mpi4py import MPI

Call = Callable[[], Any]
_ROOT = 0
_PICKLE_ROOM = 1024  # more than pickle adds to an array


class Carrier(Protocol):
    """What operations are written against. A vector form (`…_v`) has a count for each rank; here they are equal."""

    def send(self, data: Buffer, peer: int) -> Call: ...
    def receive(self, data: Buffer, peer: int) -> Call: ...
    def start_send(self, data: Buffer, peer: int) -> Call: ...
    def start_receive(self, data: Buffer, peer: int) -> Call: ...
    def barrier(self) -> Call: ...
    def all_reduce(self, data: Buffer) -> Call: ...
    def reduce(self, data: Buffer) -> Call: ...
    def broadcast(self, data: Buffer) -> Call: ...
    def all_gather(self, piece: Buffer, whole: Buffer) -> Call: ...
    def all_gather_v(self, piece: Buffer, whole: Buffer) -> Call: ...
    def all_to_all(self, source: Buffer, result: Buffer) -> Call: ...
    def all_to_all_v(self, source: Buffer, result: Buffer) -> Call: ...
    def gather(self, piece: Buffer, whole: Buffer | None) -> Call: ...
    def gather_v(self, piece: Buffer, whole: Buffer | None) -> Call: ...
    def scatter(self, whole: Buffer | None, piece: Buffer) -> Call: ...
    def scatter_v(self, whole: Buffer | None, piece: Buffer) -> Call: ...
    def reduce_scatter(self, whole: Buffer, piece: Buffer) -> Call: ...


class TorchCarrier:
    """`torch.distributed` over a process group."""

    def __init__(self, group: dist.ProcessGroup, nonblocking: bool) -> None:
        self._group, self._ranks = group, group.size()
        self._how: dict[str, Any] = {"group": group, "async_op": nonblocking}

    def send(self, data: Buffer, peer: int) -> Call:
        return partial(dist.send, data.tensor, peer, self._group)

    def receive(self, data: Buffer, peer: int) -> Call:
        return partial(dist.recv, data.tensor, peer, self._group)

    def start_send(self, data: Buffer, peer: int) -> Call:
        return partial(dist.isend, data.tensor, peer, self._group)

    def start_receive(self, data: Buffer, peer: int) -> Call:
        return partial(dist.irecv, data.tensor, peer, self._group)

    def barrier(self) -> Call:
        return partial(dist.barrier, **self._how)

    def all_reduce(self, data: Buffer) -> Call:
        return partial(dist.all_reduce, data.tensor, ReduceOp.SUM, **self._how)

    def reduce(self, data: Buffer) -> Call:
        return partial(dist.reduce, data.tensor, _ROOT, ReduceOp.SUM, **self._how)

    def broadcast(self, data: Buffer) -> Call:
        return partial(dist.broadcast, data.tensor, _ROOT, **self._how)

    def all_gather(self, piece: Buffer, whole: Buffer) -> Call:
        gather = newest("all_gather_single", "all_gather_into_tensor")
        return partial(gather, whole.tensor, piece.tensor, **self._how)

    def all_gather_v(self, piece: Buffer, whole: Buffer) -> Call:
        return partial(dist.all_gather, self._pieces(whole), piece.tensor, **self._how)

    def all_to_all(self, source: Buffer, result: Buffer) -> Call:
        return partial(dist.all_to_all_single, result.tensor, source.tensor, **self._how)

    def all_to_all_v(self, source: Buffer, result: Buffer) -> Call:
        counts = [source.tensor.numel() // self._ranks] * self._ranks
        return partial(dist.all_to_all_single, result.tensor, source.tensor, counts, counts, **self._how)

    def gather(self, piece: Buffer, whole: Buffer | None) -> Call:
        return partial(dist.gather, piece.tensor, self._pieces(whole), _ROOT, **self._how)

    def scatter(self, whole: Buffer | None, piece: Buffer) -> Call:
        return partial(dist.scatter, piece.tensor, self._pieces(whole), _ROOT, **self._how)

    def reduce_scatter(self, whole: Buffer, piece: Buffer) -> Call:
        scatter = newest("reduce_scatter_single", "reduce_scatter_tensor")
        return partial(scatter, piece.tensor, whole.tensor, ReduceOp.SUM, **self._how)

    gather_v, scatter_v = gather, scatter  # PyTorch has one of each

    def _pieces(self, whole: Buffer | None) -> Any:
        return None if whole is None else list(whole.tensor.chunk(self._ranks))


class BufferCarrier:
    """mpi4py's upper-case methods: the memory itself."""

    def __init__(self, comm: MPI.Intracomm, nonblocking: bool) -> None:
        from mpi4py import MPI

        self._comm, self._ranks, self._nonblocking, self._in_place = comm, comm.Get_size(), nonblocking, MPI.IN_PLACE

    def send(self, data: Buffer, peer: int) -> Call:
        return partial(self._comm.Send, data.memory, peer)

    def receive(self, data: Buffer, peer: int) -> Call:
        return partial(self._comm.Recv, data.memory, peer)

    def start_send(self, data: Buffer, peer: int) -> Call:
        return partial(self._comm.Isend, data.memory, peer)

    def start_receive(self, data: Buffer, peer: int) -> Call:
        return partial(self._comm.Irecv, data.memory, peer)

    def barrier(self) -> Call:
        return self._collective("Barrier")

    def all_reduce(self, data: Buffer) -> Call:
        return self._collective("Allreduce", self._in_place, data.memory)

    def reduce(self, data: Buffer) -> Call:
        root = self._comm.Get_rank() == _ROOT
        return self._collective("Reduce", *((self._in_place, data.memory) if root else (data.memory, None)))

    def broadcast(self, data: Buffer) -> Call:
        return self._collective("Bcast", data.memory)

    def all_gather(self, piece: Buffer, whole: Buffer) -> Call:
        return self._collective("Allgather", piece.memory, whole.memory)

    def all_gather_v(self, piece: Buffer, whole: Buffer) -> Call:
        return self._collective("Allgatherv", piece.memory, self._counted(whole))

    def all_to_all(self, source: Buffer, result: Buffer) -> Call:
        return self._collective("Alltoall", source.memory, result.memory)

    def all_to_all_v(self, source: Buffer, result: Buffer) -> Call:
        return self._collective("Alltoallv", self._counted(source), self._counted(result))

    def gather(self, piece: Buffer, whole: Buffer | None) -> Call:
        return self._collective("Gather", piece.memory, None if whole is None else whole.memory)

    def gather_v(self, piece: Buffer, whole: Buffer | None) -> Call:
        return self._collective("Gatherv", piece.memory, self._counted(whole))

    def scatter(self, whole: Buffer | None, piece: Buffer) -> Call:
        return self._collective("Scatter", None if whole is None else whole.memory, piece.memory)

    def scatter_v(self, whole: Buffer | None, piece: Buffer) -> Call:
        return self._collective("Scatterv", self._counted(whole), piece.memory)

    def reduce_scatter(self, whole: Buffer, piece: Buffer) -> Call:
        counts = [piece.tensor.numel()] * self._ranks
        return self._collective("Reduce_scatter", whole.memory, piece.memory, counts)

    def _collective(self, name: str, *arguments: Any) -> Call:
        return partial(getattr(self._comm, f"I{name.lower()}" if self._nonblocking else name), *arguments)

    def _counted(self, whole: Buffer | None) -> Any:
        return None if whole is None else [whole.memory, [whole.tensor.numel() // self._ranks] * self._ranks]


class ObjectCarrier:
    """mpi4py's lower-case methods: arrays are pickled, sent and unpickled. They know no counts, and no non-blocking
    collectives.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._ranks = comm, comm.Get_size()

    def send(self, data: Buffer, peer: int) -> Call:
        return lambda: self._comm.send(data.memory, peer)

    def receive(self, data: Buffer, peer: int) -> Call:
        return lambda: data.keep(self._comm.recv(None, peer))

    def start_send(self, data: Buffer, peer: int) -> Call:
        return lambda: self._comm.isend(data.memory, peer)

    def start_receive(self, data: Buffer, peer: int) -> Call:
        room = bytearray(data.memory.nbytes + _PICKLE_ROOM)
        return lambda: _Unpickled(self._comm.irecv(room, peer), data)

    def barrier(self) -> Call:
        return self._comm.barrier

    def all_reduce(self, data: Buffer) -> Call:
        return lambda: data.keep(self._comm.allreduce(data.memory))

    def reduce(self, data: Buffer) -> Call:
        if self._comm.Get_rank() == _ROOT:
            return lambda: data.keep(self._comm.reduce(data.memory))
        return lambda: self._comm.reduce(data.memory)

    def broadcast(self, data: Buffer) -> Call:
        return lambda: data.keep(self._comm.bcast(data.memory))

    def all_gather(self, piece: Buffer, whole: Buffer) -> Call:
        return lambda: whole.keep(self._comm.allgather(piece.memory))

    def all_to_all(self, source: Buffer, result: Buffer) -> Call:
        return lambda: result.keep(self._comm.alltoall(self._pieces(source)))

    def gather(self, piece: Buffer, whole: Buffer | None) -> Call:
        if whole is not None:
            return lambda: whole.keep(self._comm.gather(piece.memory))
        return lambda: self._comm.gather(piece.memory)

    def scatter(self, whole: Buffer | None, piece: Buffer) -> Call:
        return lambda: piece.keep(self._comm.scatter(self._pieces(whole)))

    def reduce_scatter(self, whole: Buffer, piece: Buffer) -> Call:
        raise NotImplementedError("mpi4py has no reduce_scatter of objects")

    all_gather_v, all_to_all_v, gather_v, scatter_v = all_gather, all_to_all, gather, scatter

    def _pieces(self, whole: Buffer | None) -> Any:
        return None if whole is None else whole.memory.reshape(self._ranks, -1)


class _Unpickled:
    """A message of an object under way; waiting for it puts what came into the buffer."""

    def __init__(self, request: MPI.Request, data: Buffer) -> None:
        self._request, self._data = request, data

    def wait(self) -> None:
        self._data.keep(self._request.wait())
