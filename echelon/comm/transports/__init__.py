"""What moves bytes. One class a library, one interface.

Every method blocks until this rank's part is done, takes contiguous tensors, and must be called by all ranks of the
group in one order; who calls it, in which thread and when, is the group's business (`lane`). Only `send` and
`receive` return at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

_SPIN_SECONDS = 1e-3  # then pauses, which let others compute but come back late
_LONGEST_PAUSE = 3e-4  # a library moves little at a time, and only while it is asked
Parcel = tuple[int, Tensor]  # a peer's rank in the group, and what goes to it or comes from it


class Request(Protocol):
    """A message under way. Only one thread may wait for it or test it at a time."""

    def wait(self) -> None: ...

    def test(self) -> bool: ...

    def source(self) -> int:
        """The sender's rank in the group, once a receive is complete."""
        ...


class Transport(Protocol):
    """The interface of a transport; `rank` and `size` are those within its group."""

    name: str
    rank: int
    size: int
    highest_tag: int
    reducible: frozenset[torch.dtype]  # what the library itself can reduce; the rest is reduced by `algorithms`
    algorithm: str  # what stands between the library and the operation, if anything does

    def all_reduce(self, tensor: Tensor, operation: str) -> None: ...

    def reduce(self, tensor: Tensor, operation: str, root: int) -> None: ...

    def reduce_scatter(self, output: Tensor, input: Tensor, operation: str) -> None: ...

    def broadcast(self, tensor: Tensor, root: int) -> None: ...

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """`input` may be this rank's part of `output`, but must not overlap it otherwise."""
        ...

    def all_gather_uneven(self, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        """As `all_gather`, with `counts[rank]` elements from each rank."""
        ...

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        """Equal parts of `input`, one for each rank."""
        ...

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send and receive parcels of any sizes, all at once; a parcel to oneself is copied."""
        ...

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Raise a TimeoutError if not all ranks have come by then. All ranks give a timeout, or none does."""
        ...

    def send(self, tensor: Tensor, rank: int, tag: int) -> Request: ...

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> Request:
        """Post a receive; `rank=None` takes a message from anyone."""
        ...

    def close(self) -> None: ...


class HostTransport(Transport, Protocol):
    """A transport for host memory, which algorithms of several levels are built on."""

    def start_exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], object]:
        """Begin an exchange; what is returned waits for its end. The tensors are in use until then."""
        ...

    def part(self, ranks: Sequence[int]) -> HostTransport:
        """One of the same kind between some of the ranks, called by these alone."""
        ...


def completes(test: Callable[[], bool], timeout: timedelta = timedelta.max) -> bool:
    """Ask `test` until it says yes; False if it has not by the end of `timeout`.

    Pauses are an eighth of what has been waited so far: the answer comes that much later at most, and whoever
    computes meanwhile keeps the core.
    """
    begin = time.monotonic()
    while not test():
        waited = time.monotonic() - begin
        if waited > timeout.total_seconds():
            return False
        if waited < _SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(waited / 8, _LONGEST_PAUSE))
    return True


def parts(count: int, size: int) -> list[slice]:
    """`count` things, in runs of `size`."""
    size = max(size, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def of_our_own(device: torch.device) -> dict[str, Any]:
    """Arguments for a stream. PyTorch hands out 32 of a priority in turn: those of another one are not the caller's."""
    return {"device": device, "priority": -1} if device.type == "cuda" else {}


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copy values, as a wire would: autograd has no part in it, whatever mode the caller or this thread is in."""
    if not (target.requires_grad or source.requires_grad or target.is_inference()):
        target.copy_(source)
        return
    with torch.inference_mode():
        target.detach().copy_(source.detach())


def copy_to_self(rank: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
    """Deliver the parcels that a rank addressed to itself, in their order."""
    for (_, source), (_, target) in zip(
        (parcel for parcel in sends if parcel[0] == rank),
        (parcel for parcel in receives if parcel[0] == rank),
        strict=True,
    ):
        copy_memory(target, source.view_as(target))


def exchange_rows(transport: Transport, output: Tensor, input: Tensor) -> None:
    """An all_to_all as an exchange."""
    there, back = input.view(transport.size, -1), output.view(transport.size, -1)
    transport.exchange(list(enumerate(there)), list(enumerate(back)))


def show(transport: Transport, words: str) -> list[str]:
    """What every rank says, over a transport for host memory. Words are of any length, so lengths go first."""
    text = torch.frombuffer(bytearray(words.encode() or b" "), dtype=torch.uint8)
    lengths = torch.empty(transport.size, dtype=torch.int64)
    transport.all_gather(lengths, torch.tensor([text.numel()]))
    counts = lengths.tolist()
    everything = torch.empty(sum(counts), dtype=torch.uint8)
    transport.all_gather_uneven(everything, text, counts)
    return [bytes(part.tolist()).decode().strip() for part in everything.split(counts)]
