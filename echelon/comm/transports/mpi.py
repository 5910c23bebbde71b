"""MPI as a transport, through mpi4py.

Memory is handed over by address with an explicit datatype, the cheapest way mpi4py has. Data that is only moved
travels as bytes, so every dtype can travel. Collectives use one communicator; point-to-point has its own, so that a
message never waits behind a collective. MPI polls while it waits; where an exchange goes to other nodes alone, and is
large enough to take its time, waiting pauses instead and leaves the cores to the computation. Open MPI 5 counts in
32-bit integers: longer messages travel as one element of a derived datatype, longer reductions in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from echelon.comm.transports import Parcel, completes, copy_to_self, exchange_rows

_MAX_COUNT = 2**31 - 1
_SEGMENT = 2**30
_PATIENT = 2**18  # bytes from which an exchange is worth a pause
_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_OPERATIONS = {
    "sum": MPI.SUM,
    "product": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}
_IN_PLACE = MPI.IN_PLACE
_address = MPI.buffer.fromaddress


class MPITransport:
    """Collectives and messages over the ranks of one group, given by its members' ranks in the MPI world."""

    name, algorithm = "mpi", ""
    reducible = frozenset(_DATATYPES)
    highest_tag: int

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Take over `comm`, which only this group uses."""
        self._comm = comm
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        neighbours = node.group.Translate_ranks(list(range(node.size)), comm.group)
        self._near = frozenset(neighbours) - {comm.rank}
        self._alone = comm.size > 1 and comm.allreduce(node.size, MPI.MAX) == 1
        node.Free()
        self._messages = comm.Dup()
        self.highest_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        size = tensor.nbytes
        if size > _MAX_COUNT and tensor.numel() > _MAX_COUNT:
            for piece in tensor.view(-1).split(_SEGMENT):
                self.all_reduce(piece, operation)
            return
        self._comm.Allreduce(
            _IN_PLACE, (_address(tensor.data_ptr(), size), _DATATYPES[tensor.dtype]), _OPERATIONS[operation]
        )

    def reduce(self, tensor: Tensor, operation: str, root: int) -> None:
        buffer = _elements(tensor)
        if self.rank == root:
            self._comm.Reduce(_IN_PLACE, buffer, _OPERATIONS[operation], root)
        else:
            self._comm.Reduce(buffer, None, _OPERATIONS[operation], root)

    def reduce_scatter(self, output: Tensor, input: Tensor, operation: str) -> None:
        self._comm.Reduce_scatter_block(_elements(input), _elements(output), _OPERATIONS[operation])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._comm.Bcast(_bytes(tensor), root)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        block = input.nbytes
        if block > _MAX_COUNT:
            self.all_gather_uneven(output, input, [input.numel()] * self.size)
            return
        in_place = input.data_ptr() == output.data_ptr() + self.rank * block
        sent = _IN_PLACE if in_place else (_address(input.data_ptr(), block), block, MPI.BYTE)
        self._comm.Allgather(sent, (_address(output.data_ptr(), output.nbytes), block, MPI.BYTE))

    def all_gather_uneven(self, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        if output.nbytes > (_PATIENT if self._alone else _MAX_COUNT):
            pieces = output.view(-1).split(list(counts))
            self.exchange([(rank, input) for rank in range(self.size)], list(enumerate(pieces)))
            return
        sizes = [count * input.element_size() for count in counts]
        self._comm.Allgatherv(_bytes(input), (_address(output.data_ptr(), output.nbytes), sizes, MPI.BYTE))

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        exchange_rows(self, output, input)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        self.start_exchange(sends, receives)()

    def start_exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], object]:
        comm, me = self._comm, self.rank
        requests = [comm.Irecv(_bytes(tensor), rank) for rank, tensor in receives if rank != me and tensor.numel()]
        requests += [comm.Isend(_bytes(tensor), rank) for rank, tensor in sends if rank != me and tensor.numel()]
        copy_to_self(me, sends, receives)
        parcels = [parcel for parcel in (*sends, *receives) if parcel[0] != me]
        far = self._near.isdisjoint(rank for rank, _ in parcels)
        if far and sum(tensor.nbytes for _, tensor in parcels) >= _PATIENT:
            return partial(completes, partial(MPI.Request.Testall, requests))
        return partial(MPI.Request.Waitall, requests)

    def part(self, ranks: Sequence[int]) -> MPITransport:
        return MPITransport(self._comm.Create_group(self._comm.group.Incl(list(ranks))))

    def barrier(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._comm.Barrier()
        elif not completes(self._comm.Ibarrier().Test, timeout):  # alone among the collectives it can be given up
            raise TimeoutError

    def send(self, tensor: Tensor, rank: int, tag: int) -> MPIRequest:
        return MPIRequest(self._messages.Isend(_bytes(tensor), rank, tag))

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> MPIRequest:
        return MPIRequest(self._messages.Irecv(_bytes(tensor), MPI.ANY_SOURCE if rank is None else rank, tag))

    def close(self) -> None:
        if MPI.Is_finalized():
            return
        self._messages.Free()
        self._comm.Free()


class MPIRequest:
    """An MPI request and the status it will have."""

    __slots__ = ("_request", "_status")

    def __init__(self, request: MPI.Request) -> None:
        self._request = request
        self._status = MPI.Status()

    def wait(self) -> None:
        self._request.Wait(self._status)

    def test(self) -> bool:
        return self._request.Test(self._status)

    def source(self) -> int:
        return self._status.Get_source()


def _elements(tensor: Tensor) -> Any:
    return _address(tensor.data_ptr(), tensor.nbytes), _DATATYPES[tensor.dtype]


def _bytes(tensor: Tensor) -> Any:
    size = tensor.nbytes
    if size > _MAX_COUNT:
        return _address(tensor.data_ptr(), size), 1, _block(size)
    return _address(tensor.data_ptr(), size), size, MPI.BYTE


@lru_cache
def _block(size: int) -> MPI.Datatype:
    """`size` bytes in a row as one element, for sizes that a 32-bit count of bytes cannot express."""
    segments, rest = divmod(size, _SEGMENT)
    body = MPI.BYTE.Create_contiguous(_SEGMENT).Create_contiguous(segments)
    tail = MPI.BYTE.Create_contiguous(rest)
    return MPI.Datatype.Create_struct([1, 1], [0, segments * _SEGMENT], [body, tail]).Commit()
