"""What was communicated, operation by operation: `with echelon.comm.record() as log:`, or `echelon run --record DIR`.

Each call becomes a `Record`, in the order of the calls. Two measures, as nccl-tests has them: `payload` is the tensor
of an all_reduce, broadcast, reduce or send, the whole output of an all_gather or gather, the whole input of a
reduce_scatter, all_to_all or scatter; `wire` is what this rank sends. Where Echelon moves the bytes itself it knows
them; what a library does inside one of its own collectives is modelled as a ring, and marked so.

Recording looks at the host's clock and at nothing else: no device is synchronised, no rank waits for another. While
nobody records, a call pays for one glance.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from echelon.comm.overlay import Overlay
from echelon.comm.records import Log, Record, RecordWriter, now
from echelon.comm.torch_compat import dimensions
from echelon.comm.transports import HostTransport, Parcel, Request, Transport, exchange_rows
from echelon.launch.identity import Identity
from echelon.launch.start import RECORD_VARIABLE


class Recorder:
    """Hands each record to all who record now."""

    def __init__(self) -> None:
        self.logs: tuple[Log | RecordWriter, ...] = ()
        self._lock = threading.Lock()
        self._hook: Any = None
        self._backwards: dict[int, list[Record]] = {}

    def attach(self, log: Log | RecordWriter) -> None:
        with self._lock:
            self.logs = (*self.logs, log)
            if self._hook is None:
                self._hook = register_optimizer_step_post_hook(self._note_step)

    def detach(self, log: Log | RecordWriter) -> None:
        with self._lock:
            self.logs = tuple(other for other in self.logs if other is not log)
            if not self.logs and self._hook is not None:
                self._hook.remove()
                self._hook = None

    def add(self, record: Record) -> None:
        for log in self.logs:
            log.append(record)

    def note_future(self, record: Record) -> None:
        """Somebody will wait for the operation by its future, inside PyTorch, where the wait cannot be seen.

        DDP's reducer does, at the end of a backward pass, in a callback that it queues when its last bucket is under
        way. One that is queued here comes before that, and one that this queues in turn comes after.
        """
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            return
        if backward not in self._backwards:
            self._backwards[backward] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(backward))
        self._backwards[backward].append(record)

    def _end_backward(self, backward: int) -> None:
        records, begin = self._backwards.pop(backward), now()

        def after() -> None:
            waited = begin
            for record in records:
                record.blocked += max(record.ended - waited, 0)
                waited = max(waited, record.ended)

        torch.autograd.Variable._execution_engine.queue_callback(after)

    def _note_step(self, *_: object) -> None:
        moment = now()
        for log in self.logs:
            log.steps.append(moment)


recorder = Recorder()


def dimension_of(name: str, description: str) -> str:
    """A group's place in a mesh; `world` for a default group that has none."""
    return dimensions.get(name) or ("world" if description == "default_pg" else "")


@contextlib.contextmanager
def record() -> Iterator[Log]:
    """Record what this rank communicates inside the block; an operation that outlasts it is completed later."""
    log = Log()
    recorder.attach(log)
    try:
        yield log
    finally:
        recorder.detach(log)


def record_if_asked(me: Identity) -> Callable[[], None]:
    """Begin to write records where `echelon run --record` wants them; returns what must be called in the end."""
    folder = os.environ.get(RECORD_VARIABLE)
    if not folder:
        return lambda: None
    writer = RecordWriter(Path(folder), me.rank, me.size)
    recorder.attach(writer)
    return writer.close


class Tap:
    """A transport that notes what it is asked to move; `open` gives it the one that does the work."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._calls: list[str] = []
        self._by_algorithm = False  # whether the road's own had a part in it

    def open(self, transport: Transport, sequence: int) -> Transport:
        """What to carry out the operation with: an algorithm is kept, over this in place of its own host."""
        overlay = transport if isinstance(transport, Overlay) else None
        self._written = overlay.written if overlay is not None else lambda: 0
        self._before = self._written()
        self._transport = transport if overlay is None else overlay.host
        self.name, self.rank, self.size = transport.name, transport.rank, transport.size
        self.reducible, self.highest_tag = transport.reducible, transport.highest_tag
        self.algorithm = transport.algorithm
        self.record.transport, self.record.sequence = transport.name, sequence
        self.record.started = now()
        return (
            self
            if overlay is None
            else overlay.over(self, {name: self._way(way) for name, way in overlay.ways.items()})
        )

    def close(self) -> None:
        self.record.wire += self._written() - self._before
        calls = list(dict.fromkeys(self._calls))
        alone = " + ".join(calls) if len(calls) > 1 or "exchange" in calls else "library"
        self.record.algorithm = self.algorithm if self._by_algorithm else alone
        self.record.ended = now()

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        self._model("all_reduce", 2 * tensor.nbytes * (self.size - 1) // self.size)
        self._transport.all_reduce(tensor, operation)

    def reduce(self, tensor: Tensor, operation: str, root: int) -> None:
        self._model("reduce", tensor.nbytes)
        self._transport.reduce(tensor, operation, root)

    def reduce_scatter(self, output: Tensor, input: Tensor, operation: str) -> None:
        self._model("reduce_scatter", input.nbytes * (self.size - 1) // self.size)
        self._transport.reduce_scatter(output, input, operation)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._model("broadcast", tensor.nbytes)
        self._transport.broadcast(tensor, root)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self._model("all_gather", output.nbytes * (self.size - 1) // self.size)
        self._transport.all_gather(output, input)

    def all_gather_uneven(self, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        self._model("all_gather_uneven", output.nbytes * (self.size - 1) // self.size)
        self._transport.all_gather_uneven(output, input, counts)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        exchange_rows(self, output, input)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        self._note_exchange(sends)
        self._transport.exchange(sends, receives)

    def start_exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], object]:
        self._note_exchange(sends)
        return cast(HostTransport, self._transport).start_exchange(sends, receives)

    def barrier(self, timeout: timedelta | None = None) -> None:
        self._calls.append("barrier")
        self._transport.barrier(timeout)

    def send(self, tensor: Tensor, rank: int, tag: int) -> Request:
        return self._transport.send(tensor, rank, tag)

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> Request:
        return self._transport.receive(tensor, rank, tag)

    def _way(self, way: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any) -> None:
            self._by_algorithm = True
            way(*arguments)

        return noted

    def _note_exchange(self, sends: Sequence[Parcel]) -> None:
        self._calls.append("exchange")
        self.record.wire += sum(tensor.nbytes for rank, tensor in sends if rank != self.rank)

    def _model(self, call: str, wire: int) -> None:
        self._calls.append(call)
        self.record.wire += wire
        self.record.modelled = self.size > 1
