"""Messages of device tensors, over a transport that moves host memory.

A message begins with a header, which leaves at once and so in the order of the calls; what follows has a tag of its
own, so that a receiver need not know beforehand who sends. The rest goes through pinned memory in chunks, each as soon
as it has left the device; or, if it is large and both ranks are on one GPU, through the sender's outbox in the GPU's
memory, half by half. Whether a peer can read the outbox the first large message to it finds out.

The steps of a message are a generator of what must be waited for: whoever waits for the message, or tests it, carries
it on. The code asks PyTorch for the module of the device, and so runs on the CPU as well, where its tests are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from echelon.comm.transports import Request, Transport, gpu_memory, of_our_own, parts
from echelon.comm.transports.gpu_memory import Outbox

CHUNK = 2**22  # bytes: as many as MPI moves fastest (benchmarks/h200/comm.py)
SHARED_FROM = 2**21  # bytes from which the outbox is the faster way (benchmarks/h200/comm.py)
_HEADER = 256  # bytes: three numbers (the tag of what follows, the message's bytes, its way), then the sender's place
_PLACE = 24  # where that begins
_HANDLE = 1024  # bytes
_STAGED, _SHARED, _ASK = range(3)  # _ASK: _SHARED if the receiver can, else _STAGED
_OWN_TAGS = 2**14  # the highest tags of MPI, in pairs: what follows a header, and what the receiver answers
_serial = count()  # of all messages of this process, whatever their device and group


class Step(Protocol):
    """What a message waits for before it goes on: a request of the host's transport, or a copy."""

    def wait(self) -> None: ...

    def test(self) -> bool: ...


Steps = Iterator[Step]
Talk = Generator[Step, None, bool]


class DeviceMessages:
    """The messages of a group's rank on one device, where its process has this outbox."""

    def __init__(self, host: Transport, device: torch.device, outbox: Outbox) -> None:
        self._host = host
        self._outbox = outbox
        self._lock = threading.Lock()
        self._handles: dict[int, str] = {}  # what peers were shown
        self._readers: dict[int, bool] = {}  # whether a peer can read our outbox
        self._opened: dict[int, Tensor] = {}  # peers' outboxes
        self._pin = device.type != "cpu"
        self._device = torch.get_device_module(device)
        self._in, self._out = (self._device.Stream(**of_our_own(device)) for _ in range(2))
        self._highest_tag = host.highest_tag - _OWN_TAGS - 1

    def send(self, tensor: Tensor, rank: int, tag: int) -> Request:
        if not 0 <= tag <= self._highest_tag:
            raise ValueError(f"messages of device tensors have tags from 0 to {self._highest_tag}, and not {tag}")
        further = self._highest_tag + 1 + next(_serial) * 2 % _OWN_TAGS
        slot = self._slot_for(tensor, rank)
        way = _STAGED if slot is None else _SHARED if rank in self._readers else _ASK
        header = torch.zeros(_HEADER, dtype=torch.uint8)
        header[:_PLACE].view(torch.int64).copy_(torch.tensor([further, tensor.nbytes, way]))
        _write(header[_PLACE:], self._outbox.place)
        self._in.wait_stream(self._device.current_stream())
        begun = _Held(self._host.send(header, rank, tag), header)
        return _Message(self._send(_bytes(tensor), rank, further, way, slot, begun), begun)

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> Request:
        header = torch.empty(_HEADER, dtype=torch.uint8)
        begun = _Held(self._host.receive(header, rank, tag), header)
        return _Message(self._receive(_bytes(tensor), header, begun, self._device.current_stream()), begun)

    def _slot_for(self, tensor: Tensor, rank: int) -> int | None:
        hopeful = tensor.nbytes >= SHARED_FROM and self._readers.get(rank, rank != self._host.rank)
        return self._outbox.take() if hopeful else None

    def _send(self, source: Tensor, rank: int, further: int, way: int, slot: int | None, begun: Request) -> Steps:
        if slot is not None and way == _ASK and not (yield from self._ask(rank, further)):
            self._outbox.give_back(slot)
            slot = None
        if slot is None:
            yield from self._send_staged(source, rank, further)
        else:
            yield from self._send_shared(source, rank, further, slot)
            self._outbox.give_back(slot)
        yield begun

    def _receive(self, target: Tensor, header: Tensor, begun: Request, stream: Any) -> Steps:
        yield begun
        rank = begun.source()
        further, size, way = header[:_PLACE].view(torch.int64).tolist()
        if size != target.numel():
            raise RuntimeError(f"a message of {size:,} bytes came from rank {rank} for a tensor of {target.numel():,}")
        self._out.wait_stream(stream)
        if way == _ASK:
            way = _SHARED if (yield from self._answer(rank, further, _read(header[_PLACE:]))) else _STAGED
        yield from (self._receive_staged if way == _STAGED else self._receive_shared)(target, rank, further)
        stream.wait_stream(self._out)

    def _send_staged(self, source: Tensor, rank: int, tag: int) -> Steps:
        chunks = [(self._pinned(part), part) for part in parts(source.numel(), CHUNK)]
        copies = [self._copy(self._in, chunk, source[part]) for chunk, part in chunks]
        requests = []
        for (chunk, _), copied in zip(chunks, copies, strict=True):
            yield copied
            requests.append(self._host.send(chunk, rank, tag))
        yield from requests

    def _receive_staged(self, target: Tensor, rank: int, tag: int) -> Steps:
        chunks = [(self._pinned(part), part) for part in parts(target.numel(), CHUNK)]
        arrivals = [self._host.receive(chunk, rank, tag) for chunk, _ in chunks]
        for (chunk, part), arrived in zip(chunks, arrivals, strict=True):
            yield arrived
            self._copy(self._out, target[part], chunk)

    def _send_shared(self, source: Tensor, rank: int, tag: int, slot: int) -> Steps:
        """Half by half; one is written again when the receiver has answered that it was read."""
        written: list[Request] = []
        taken: list[Request] = []
        for number, part in enumerate(parts(source.numel(), gpu_memory.HALF)):
            if number >= 2:
                yield taken[number - 2]
            offset, half = self._outbox.half(slot, number)
            yield self._copy(self._in, half[: part.stop - part.start], source[part])
            written.append(self._tell(offset, rank, tag))
            taken.append(self._hear(rank, tag + 1))
        yield from (*written, *taken)

    def _receive_shared(self, target: Tensor, rank: int, tag: int) -> Steps:
        answers = []
        for part in parts(target.numel(), gpu_memory.HALF):
            yield (written := self._hear(rank, tag))
            half = self._opened[rank][written.number() :]
            yield self._copy(self._out, target[part], half[: part.stop - part.start])
            answers.append(self._tell(1, rank, tag + 1))
        yield from answers

    def _ask(self, rank: int, tag: int) -> Talk:
        """The header told where we are: if the receiver is there too, show it the outbox."""
        yield (same := self._hear(rank, tag + 1))
        able = bool(same.number())
        if able:
            with self._lock:
                if rank not in self._handles:
                    self._handles[rank] = self._outbox.show()
            handle = torch.zeros(_HANDLE, dtype=torch.uint8)
            _write(handle, self._handles[rank])
            yield _Held(self._host.send(handle, rank, tag), handle)
            yield (read := self._hear(rank, tag + 1))
            able = bool(read.number())
        self._readers[rank] = able
        return able

    def _answer(self, rank: int, tag: int, place: str) -> Talk:
        same = self._outbox.place == place
        yield self._tell(int(same), rank, tag + 1)
        if not same:
            return False
        handle = torch.empty(_HANDLE, dtype=torch.uint8)
        yield self._host.receive(handle, rank, tag)
        with self._lock:
            if rank not in self._opened:
                with contextlib.suppress(RuntimeError, ValueError, SyntaxError):
                    self._opened[rank] = self._outbox.open(_read(handle))
        yield self._tell(int(rank in self._opened), rank, tag + 1)
        return rank in self._opened

    def _tell(self, number: int, rank: int, tag: int) -> _Held:
        memory = torch.tensor([number])
        return _Held(self._host.send(memory, rank, tag), memory)

    def _hear(self, rank: int, tag: int) -> _Held:
        memory = torch.empty(1, dtype=torch.int64)
        return _Held(self._host.receive(memory, rank, tag), memory)

    @torch.inference_mode()  # the numbers only
    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> _Copied:
        with self._device.stream(stream):
            target.copy_(source, non_blocking=True)
            done = self._device.Event()
            done.record(stream)
        return _Copied(done)

    def _pinned(self, part: slice) -> Tensor:
        return torch.empty(part.stop - part.start, dtype=torch.uint8, pin_memory=self._pin)


class _Message:
    """A message as its steps, each of which must be over before the next is taken."""

    def __init__(self, steps: Steps, begun: Request) -> None:
        self._steps = steps
        self._step = next(steps, None)
        self.source = begun.source

    def wait(self) -> None:
        while self._step is not None:
            self._step.wait()
            self._step = next(self._steps, None)

    def test(self) -> bool:
        while self._step is not None and self._step.test():
            self._step = next(self._steps, None)
        return self._step is None


class _Held:
    """A request with the memory that it needs."""

    def __init__(self, request: Request, memory: Tensor) -> None:
        self._memory = memory
        self.wait, self.test, self.source = request.wait, request.test, request.source

    def number(self) -> int:
        return int(self._memory)


class _Copied:
    """A copy on the device."""

    def __init__(self, done: Any) -> None:
        self.wait: Callable[[], None] = done.synchronize
        self.test: Callable[[], bool] = done.query


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _write(memory: Tensor, words: str) -> None:
    memory[: len(words)] = torch.tensor(list(words.encode()), dtype=torch.uint8)


def _read(memory: Tensor) -> str:
    return bytes(memory.tolist()).rstrip(b"\0").decode()
