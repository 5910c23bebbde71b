"""The ways of device tensors, on the CPU: PyTorch's streams and events do nothing there, the rest is the same code.

The GPU's own part is in tests/gpu. Chunks and mailboxes are made small, so that little data takes many rounds.
"""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from echelon.comm import operations
from echelon.comm.reduction import resolve
from echelon.comm.transports import gpu_memory, messages, shared, staged
from echelon.comm.transports.direct import DirectTransport
from echelon.comm.transports.gpu_memory import Outbox
from echelon.comm.transports.shared import SharedTransport
from echelon.comm.transports.staged import StagedTransport
from tests.comm.data import DTYPES, assert_same, dtype_of, op_of, operations_of, reduced, values

KINDS = ("staged", "shared", "direct")
RANKS = 3
SMALL = 192  # bytes


class FileOutbox(Outbox):
    """A file stands for the GPU's memory."""

    def __init__(self, place: str, file: str) -> None:
        self._file = file
        with mock.patch.object(gpu_memory, "place_of", return_value=place):
            super().__init__(torch.device("cpu"))

    def show(self) -> str:
        return self._file

    def open(self, handle: str) -> torch.Tensor:
        if "cannot" in handle:
            raise RuntimeError("no access")
        return mapped(handle, 2 * gpu_memory._SLOTS * gpu_memory.HALF)

    def _allocate(self, size: int) -> torch.Tensor:
        return mapped(self._file, size)


def mapped(file: str, size: int) -> torch.Tensor:
    return torch.from_file(file, shared=True, size=size, dtype=torch.uint8)


def transport(kind: str, folder: str):
    """One over this rank's own MPI transport; mailboxes are files here."""
    host, device = dist.group.WORLD._roads.base, torch.device("cpu")
    if kind == "direct":
        return DirectTransport(host, device)
    place = str(host.rank) if kind == "staged" else "one place"
    name = "cannot be opened" if kind == "refused" else "outbox"
    outbox = FileOutbox(place, str(Path(folder) / f"{name} {host.rank}"))
    by_host = StagedTransport(host, device, outbox)
    if kind != "shared":
        return by_host
    boxes = [mapped(str(Path(folder) / str(rank)), 2 * shared.HALF) for rank in range(host.size)]
    host.barrier()
    return SharedTransport(host, by_host, boxes)


def small(function):
    """With chunks and halves of a few dozen elements."""

    @functools.wraps(function)
    def body(*arguments):
        with (
            mock.patch.object(staged, "CHUNK", SMALL),
            mock.patch.object(messages, "CHUNK", SMALL),
            mock.patch.object(messages, "SHARED_FROM", SMALL),
            mock.patch.object(gpu_memory, "HALF", SMALL),
            mock.patch.object(shared, "HALF", SMALL),
            mock.patch.object(shared, "_STAGED", 0),
        ):
            return function(*arguments)

    return body


@small
def check(kind: str, dtype_name: str, folder: str) -> None:
    over = transport(kind, folder)
    rank, size = over.rank, over.size
    dtype = dtype_of(dtype_name)
    for count in (1, 7, 100):
        inputs = [values(r, count, dtype) for r in range(size)]
        for op in operations_of(dtype_name):
            reduction = resolve(op_of(op), dtype)
            operations.all_reduce(over, x := inputs[rank].clone(), reduction)
            assert_same(x, reduced(inputs, op))
            operations.reduce(over, x := inputs[rank].clone(), 1, reduction)
            assert_same(x, reduced(inputs, op) if rank == 1 else inputs[rank])
            pieces = [values(r, count * size, dtype) for r in range(size)]
            operations.reduce_scatter_single(over, out := torch.empty(count, dtype=dtype), pieces[rank], reduction)
            assert_same(out, reduced([piece.view(size, count)[rank] for piece in pieces], op))
        operations.broadcast(over, x := inputs[rank].clone(), 2)
        assert_same(x, inputs[2])
        operations.all_gather_single(over, whole := torch.empty(size * count, dtype=dtype), inputs[rank])
        assert_same(whole, torch.cat(inputs))
        uneven = [values(r, count + r, dtype) for r in range(size)]
        operations.all_gather(over, outs := [torch.empty_like(x) for x in uneven], uneven[rank])
        for out, expected in zip(outs, uneven, strict=True):
            assert_same(out, expected)
        outs = [torch.empty_like(x) for x in inputs] if rank == 0 else None
        operations.gather(over, outs, inputs[rank], 0)
        for out, expected in zip(outs or [], inputs if outs else [], strict=True):
            assert_same(out, expected)
        splits = [[3 * r + 2 * peer for peer in range(size)] for r in range(size)]
        sent = [values(r, sum(splits[r]), dtype) for r in range(size)]
        received = [splits[r][rank] for r in range(size)]
        out = torch.empty(sum(received), dtype=dtype)
        operations.all_to_all_single(over, out, sent[rank], received, splits[rank])
        assert_same(out, torch.cat([sent[r].split(splits[r])[rank] for r in range(size)]))
    over.close()


def drive(requests: list) -> None:
    """As the post office does with messages that nobody waits for."""
    while requests := [request for request in requests if not request.test()]:
        time.sleep(1e-4)


@small
def exchange(kind: str, folder: str) -> None:
    """Of all sizes at once, in chunks: none overtakes another, and any source is told apart."""
    over = transport(kind, folder)
    rank, size = over.rank, over.size
    sizes = (0, 1, 50, 5, 400, 47, 48, 49)
    to, source = (rank + 1) % size, (rank - 1) % size
    sends = [over.send(torch.full((count,), rank * 1000.0 + count), to, 5) for count in sizes]
    buffers = [torch.empty(count) for count in sizes]
    receives = [over.receive(buffer, source, 5) for buffer in buffers]
    driver = threading.Thread(target=drive, args=(sends,))
    driver.start()
    for request in reversed(receives):
        request.wait()
    driver.join()
    assert [buffer.tolist() for buffer in buffers] == [[source * 1000.0 + count] * count for count in sizes]
    if rank == 0:
        found = {}
        for _ in range(size - 1):
            request = over.receive(buffer := torch.empty(300), None, 6)
            request.wait()
            found[request.source()] = buffer.unique().tolist()
        assert found == {r: [float(r)] for r in range(1, size)}
    else:
        over.send(torch.full((300,), float(rank)), 0, 6).wait()
    if isinstance(over, SharedTransport | StagedTransport):
        talk = (over._by_host if kind == "shared" else over)._messages
        assert set(talk._readers.values()) == {kind == "shared"}
        assert talk._outbox.take() is not None
        assert talk._outbox.take() is not None
        assert talk._outbox.take() is None


@small
def wrong_size(folder: str) -> None:
    over = transport("refused", folder)
    if over.rank == 0:
        over.send(torch.zeros(100), 1, 0)
    else:
        with pytest.raises(RuntimeError, match="a message of 400 bytes came from rank 0 for a tensor of 404"):
            over.receive(torch.zeros(101), 0, 0).wait()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_operations(ranks, tmp_path, kind, dtype):
    ranks(RANKS, check, kind, dtype, str(tmp_path))


@pytest.mark.parametrize("kind", [*KINDS, "refused"])
def test_messages(ranks, tmp_path, kind):
    ranks(RANKS, exchange, kind, str(tmp_path))


def test_message_of_another_size(ranks, tmp_path):
    ranks(2, wrong_size, str(tmp_path))
