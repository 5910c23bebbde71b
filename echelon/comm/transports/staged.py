"""Device tensors over a transport that moves host memory: through pinned memory, in chunks, one behind the other.

While MPI moves one chunk, the next is on its way from the device and the one before on its way back. Copies run on
two streams of their own, ordered with the current stream by events; the host waits for events, never for the device.
The code asks PyTorch for the module of the device, and so runs on the CPU as well, where its tests are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count, cycle
from typing import Any

import torch
from torch import Tensor

from echelon.comm.transports import Parcel, Request, Transport, copy_to_self

CHUNK = 2**22  # bytes: as many as MPI moves fastest (benchmarks/h200/comm.py)
_DEPTH = 3
_HEADER = 64  # bytes before a message's first chunk, for the tag of the others
_CHUNK_TAGS = 2**14  # the highest tags of MPI, which are for them
_serial = count()  # of all messages of this process, whatever their device and group


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

    def __init__(self, host: Transport, device: torch.device) -> None:
        self.name = f"{host.name}, staged"
        self.rank, self.size, self.reducible = host.rank, host.size, host.reducible
        self.highest_tag = host.highest_tag
        self._host = host
        self._pin = device.type != "cpu"
        self._device = torch.get_device_module(device)
        place = {"device": device} if device.type == "cuda" else {}  # or it would be the thread's current device
        self._in, self._out = (self._device.Stream(**place) for _ in range(2))
        self._slots = [_Slot(self._device.Event(), self._device.Event()) for _ in range(_DEPTH)]
        self._unposted: deque[_StagedSend] = deque()
        self._posting = threading.RLock()
        self._chunk_tags = host.highest_tag - _CHUNK_TAGS

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

    @torch.inference_mode()
    def send(self, tensor: Tensor, rank: int, tag: int) -> Request:
        """The first chunk carries the tag of the others: a receiver need not know beforehand who sends."""
        if not 0 <= tag < self._chunk_tags:
            raise ValueError(f"messages of device tensors have tags from 0 to {self._chunk_tags - 1}, and not {tag}")
        further = self._chunk_tags + next(_serial) % _CHUNK_TAGS
        staged = self._pinned(_HEADER + tensor.nbytes)
        staged[:8].view(torch.int64).fill_(further)
        source, target = tensor.view(-1).view(torch.uint8), staged[_HEADER:]
        self._in.wait_stream(self._device.current_stream())
        chunks = []
        with self._device.stream(self._in):
            for part in parts(max(tensor.nbytes, 1), CHUNK):
                target[part].copy_(source[part], non_blocking=True)
                ready = self._device.Event()
                ready.record(self._in)
                begin = 0 if part.start == 0 else _HEADER + part.start
                chunks.append((ready, staged[begin : _HEADER + part.stop]))

        def post(number: int, chunk: Tensor) -> Request:
            return self._host.send(chunk, rank, tag if number == 0 else further)

        send = _StagedSend(self, chunks, post)
        with self._posting:
            self._unposted.append(send)
        self.post(send, wait=False)
        return send

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> Request:
        staged = self._pinned(_HEADER + tensor.nbytes)

        @torch.inference_mode()
        def finish() -> None:
            self._out.wait_stream(self._device.current_stream())
            with self._device.stream(self._out):
                tensor.view(-1).view(torch.uint8).copy_(staged[_HEADER:], non_blocking=True)
            self._device.current_stream().wait_stream(self._out)

        return _StagedReceive(self._host, staged, rank, tag, finish)

    def close(self) -> None:
        """The host's transport is closed by the group that it belongs to."""

    def post(self, until: _StagedSend, wait: bool) -> None:
        """Give MPI the chunks that have left the device, message after message, so that none overtakes another."""
        with self._posting:
            while self._unposted and not until.posted:
                try:
                    if not self._unposted[0].post_chunks(wait):
                        return
                except BaseException:
                    self._unposted.popleft()  # it fails alone
                    raise
                self._unposted.popleft()

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


class _StagedSend:
    """A message whose chunks become MPI's, in order, as they leave the device."""

    def __init__(
        self, transport: StagedTransport, chunks: list[tuple[Any, Tensor]], post: Callable[[int, Tensor], Request]
    ) -> None:
        self._transport = transport
        self._chunks = chunks
        self._post = post
        self._requests: list[Request] = []

    @property
    def posted(self) -> bool:
        return len(self._requests) == len(self._chunks)

    def post_chunks(self, wait: bool) -> bool:
        """True once all are posted."""
        for number in range(len(self._requests), len(self._chunks)):
            ready, chunk = self._chunks[number]
            if wait:
                ready.synchronize()
            elif not ready.query():
                return False
            self._requests.append(self._post(number, chunk))
        return True

    def wait(self) -> None:
        self._transport.post(self, wait=True)
        for request in self._requests:
            request.wait()

    def test(self) -> bool:
        self._transport.post(self, wait=False)
        return self.posted and all(request.test() for request in self._requests)

    def source(self) -> int:
        return self._transport.rank


class _StagedReceive:
    """A message that comes in chunks: when the first is here, it is known who sent it and how the others are marked."""

    def __init__(self, host: Transport, staged: Tensor, rank: int | None, tag: int, finish: Callable[[], None]) -> None:
        self._host = host
        self._staged = staged
        self._finish = finish
        self._first = host.receive(staged[: _HEADER + CHUNK], rank, tag)
        self._rest: list[Request] | None = None
        self._done = False

    def wait(self) -> None:
        if self._rest is None:
            self._first.wait()
        for request in self._further():
            request.wait()
        self._end()

    def test(self) -> bool:
        if self._rest is None and not self._first.test():
            return False
        if not all(request.test() for request in self._further()):
            return False
        self._end()
        return True

    def source(self) -> int:
        return self._first.source()

    def _further(self) -> list[Request]:
        if self._rest is None:
            tag, source = int(self._staged[:8].view(torch.int64)), self._first.source()
            body = self._staged[_HEADER:]
            later = [part for part in parts(body.numel(), CHUNK) if part.start]
            self._rest = [self._host.receive(body[part], source, tag) for part in later]
        return self._rest

    def _end(self) -> None:
        if not self._done:
            self._done = True
            self._finish()


def parts(count: int, size: int) -> list[slice]:
    """`count` things, in runs of `size`."""
    size = max(size, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


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
