"""Device tensors over a transport that moves host memory: through pinned memory, in chunks, one behind the other.

While MPI moves one chunk, the next is on its way from the device and the one before on its way back. Copies run on
two streams of their own, ordered with the current stream by events; the host waits for events, never for the device.
The code asks PyTorch for the module of the device, and so runs on the CPU as well, where its tests are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from echelon.comm.transports import Parcel, Request, Transport, copy_to_self, of_our_own, parts
from echelon.comm.transports.gpu_memory import Outbox
from echelon.comm.transports.messages import CHUNK, DeviceMessages

_DEPTH = 3


@dataclass
class Step:
    """One chunk's way: `fetch` from the device, `run` on the host (input, output), `store` to the device."""

    fetch: list[Tensor]
    store: list[Tensor]
    run: Callable[[Tensor, Tensor], None]
    in_place: bool = False  # the output is the input's memory
    bytes: int = 0  # of that memory; by default what is fetched


@dataclass
class _Slot:
    """Pinned memory for one chunk on its way."""

    ready: Any
    free: Any
    inward: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    outward: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class StagedTransport:
    """`host`, for the tensors of a device."""

    def __init__(self, host: Transport, device: torch.device, outbox: Outbox) -> None:
        self.name = f"{host.name}, staged"
        self.rank, self.size, self.reducible = host.rank, host.size, host.reducible
        self.highest_tag = host.highest_tag
        self.algorithm = host.algorithm
        self._host = host
        self._pin = device.type != "cpu"
        self._device = torch.get_device_module(device)
        self._in, self._out = (self._device.Stream(**of_our_own(device)) for _ in range(2))
        self._slots = [_Slot(self._device.Event(), self._device.Event()) for _ in range(_DEPTH)]
        self._messages = DeviceMessages(host, device, outbox)

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        def run(chunk: Tensor, _: Tensor) -> None:
            self._host.all_reduce(chunk.view(tensor.dtype), operation)

        self._do(Step([chunk], [chunk], run, in_place=True) for chunk in _chunks(tensor))

    def reduce(self, tensor: Tensor, operation: str, root: int) -> None:
        def run(chunk: Tensor, _: Tensor) -> None:
            self._host.reduce(chunk.view(tensor.dtype), operation, root)

        mine = self.rank == root
        self._do(Step([chunk], [chunk] if mine else [], run, in_place=True) for chunk in _chunks(tensor))

    def reduce_scatter(self, output: Tensor, input: Tensor, operation: str) -> None:
        def run(pieces: Tensor, piece: Tensor) -> None:
            self._host.reduce_scatter(piece.view(output.dtype), pieces.view(output.dtype), operation)

        rows = input.view(self.size, -1)
        self._do(
            Step([row[part] for row in rows], [output.view(-1)[part]], run)
            for part in parts(output.numel(), CHUNK // self.size // output.element_size())
        )

    def broadcast(self, tensor: Tensor, root: int) -> None:
        def run(chunk: Tensor, _: Tensor) -> None:
            self._host.broadcast(chunk, root)

        mine = self.rank == root
        self._do(
            Step([chunk] if mine else [], [] if mine else [chunk], run, in_place=True, bytes=chunk.nbytes)
            for chunk in _chunks(tensor)
        )

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        def run(piece: Tensor, pieces: Tensor) -> None:
            self._host.all_gather(pieces, piece)

        rows = output.view(self.size, -1)
        self._do(
            Step([input.view(-1)[part]], [row[part] for row in rows], run)
            for part in parts(input.numel(), CHUNK // self.size // input.element_size())
        )

    def all_gather_uneven(self, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        pieces = output.view(-1).split(list(counts))
        self.exchange([(rank, input) for rank in range(self.size)], list(enumerate(pieces)))

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        def run(there: Tensor, back: Tensor) -> None:
            self._host.all_to_all(back, there)

        rows, results = input.view(self.size, -1), output.view(self.size, -1)
        self._do(
            Step([row[part] for row in rows], [row[part] for row in results], run)
            for part in parts(rows.shape[1], CHUNK // self.size // input.element_size())
        )

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """In as many rounds as the longest parcel needs; both ends of a parcel know its length."""
        copy_to_self(self.rank, sends, receives)
        sent, received = self._in_rounds(sends), self._in_rounds(receives)

        def steps() -> Iterable[Step]:
            for number in range(max(len(sent), len(received))):
                out, back = (rounds[number] if number < len(rounds) else [] for rounds in (sent, received))

                def run(outgoing: Tensor, incoming: Tensor, out: list[Parcel] = out, back: list[Parcel] = back) -> None:
                    self._host.exchange(_over(outgoing, out), _over(incoming, back))

                yield Step([tensor for _, tensor in out], [tensor for _, tensor in back], run)

        self._do(steps())

    def barrier(self, timeout: timedelta | None = None) -> None:
        self._host.barrier(timeout)

    def send(self, tensor: Tensor, rank: int, tag: int) -> Request:
        return self._messages.send(tensor, rank, tag)

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> Request:
        return self._messages.receive(tensor, rank, tag)

    def close(self) -> None:
        """The host's transport is closed by the group that it belongs to."""

    @torch.inference_mode()  # the numbers only
    def _do(self, steps: Iterable[Step]) -> None:
        current = self._device.current_stream()
        self._in.wait_stream(current)
        self._out.wait_stream(current)
        fetched: deque[tuple[Step, _Slot]] = deque()
        for step, slot in zip(steps, cycle(self._slots), strict=False):
            self._fetch(step, slot)
            fetched.append((step, slot))
            if len(fetched) == _DEPTH - 1:
                self._finish(*fetched.popleft())
        while fetched:
            self._finish(*fetched.popleft())
        current.wait_stream(self._out)

    def _fetch(self, step: Step, slot: _Slot) -> None:
        slot.free.synchronize()
        slot.inward = self._at_least(slot.inward, max(step.bytes, sum(tensor.nbytes for tensor in step.fetch)))
        with self._device.stream(self._in):
            _copy_each(_in_turn(slot.inward, step.fetch), step.fetch)
        slot.ready.record(self._in)

    def _finish(self, step: Step, slot: _Slot) -> None:
        fetched = step.bytes or sum(tensor.nbytes for tensor in step.fetch)
        stored = sum(tensor.nbytes for tensor in step.store)
        slot.outward = slot.outward if step.in_place else self._at_least(slot.outward, stored)
        result = slot.inward if step.in_place else slot.outward
        slot.ready.synchronize()
        step.run(slot.inward[:fetched], result[:stored])
        with self._device.stream(self._out):
            _copy_each(step.store, _in_turn(result, step.store))
        slot.free.record(self._out)

    def _in_rounds(self, parcels: Sequence[Parcel]) -> list[list[Parcel]]:
        rounds: list[list[Parcel]] = []
        for rank, tensor in parcels:
            if rank != self.rank and tensor.numel():
                flat = tensor.view(-1).view(torch.uint8)
                for number, part in enumerate(parts(flat.numel(), CHUNK // self.size)):
                    if number == len(rounds):
                        rounds.append([])
                    rounds[number].append((rank, flat[part]))
        return rounds

    def _at_least(self, memory: Tensor, size: int) -> Tensor:
        return memory if memory.numel() >= size else self._pinned(max(size, CHUNK))

    def _pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.view(-1)
    return [flat[part] for part in parts(flat.numel(), CHUNK // tensor.element_size())]


def _in_turn(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Stretches of `memory`, one behind the other, each as long as its tensor."""
    places, start = [], 0
    for tensor in tensors:
        places.append(memory[start : start + tensor.nbytes])
        start += tensor.nbytes
    return places


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8), non_blocking=True)


def _over(memory: Tensor, parcels: Sequence[Parcel]) -> list[Parcel]:
    """The same parcels, but in host memory."""
    places = _in_turn(memory, [tensor for _, tensor in parcels])
    return [(rank, place) for (rank, _), place in zip(parcels, places, strict=True)]
