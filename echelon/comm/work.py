"""What a caller holds while an operation is under way: PyTorch's `Work`, for collectives and for messages.

Made as cheap as Python allows: a future exists only for those who ask for it. Futures are completed in threads of
their own, since the callbacks of a future may themselves wait for collectives (PowerSGD's do), which the thread that
runs collectives must not.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed import DistBackendError, Work
from torch.futures import Future

from echelon.comm.recorder import recorder
from echelon.comm.records import Record, now
from echelon.comm.streams import Ordering
from echelon.comm.transports import Request, completes

Note = tuple[int, int]  # for the logbook: the code of an operation, and the elements it is done to
_NO_TIMEOUT = timedelta(0)
_numbers = itertools.count(1)
_futures = allocate_lock()  # guards the moment in which a future and a result meet


class _EchelonWork(Work):
    """What both kinds share: a result, an error, and a future for those who want one."""

    __slots__ = ("_error", "_finished", "_future", "_outputs", "_record", "ordering")

    def __init__(self, outputs: list[Tensor], ordering: Ordering | None, record: Record | None) -> None:
        """`ordering` is with the caller's CUDA stream, if it has a part in this; `record` is for who records."""
        super().__init__()
        self._outputs = outputs
        self._record = record
        self.ordering = ordering
        self._error: BaseException | None = None
        self._finished = False
        self._future: Future[Any] | None = None

    def is_completed(self) -> bool:
        return self._finished and (self.ordering is None or self.ordering.is_over())

    def is_success(self) -> bool:
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    @property
    def is_finished(self) -> bool:
        """As `is_completed`, without driving anything."""
        return self._finished

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        with _futures:
            if self._future is None:
                self._future = Future() if self.ordering is None else Future(devices=[self.ordering.device])
                if self._record is not None:
                    recorder.note_future(self._record)
                if self._finished:
                    self._complete(self._future)
            return self._future

    def finish(self) -> None:
        """The operation is over: hand the result to the future, if anyone asked for one."""
        with _futures:
            self._finished = True
            future = self._future
        if future is not None:
            try:
                _callback_threads().submit(self._complete, future)
            except RuntimeError:  # the interpreter is ending and starts no more threads
                self._complete(future)

    def _complete(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        elif self.ordering is None:
            future.set_result(self._outputs)
        else:
            with self.ordering.there():  # whoever waits for the future waits for this stream
                future.set_result(self._outputs)

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        """Around a wait, for who records."""
        begin = now() if self._record is not None else 0
        try:
            yield
        finally:
            if self._record is not None:
                self._record.blocked += now() - begin

    def _close_wait(self) -> bool:
        """The end of every `wait`: the error is raised, or what follows is put behind the result."""
        if self._error is not None:
            raise self._error
        if self.ordering is not None:
            self.ordering.join()
        return True

    def _timed_out(self, timeout: timedelta) -> DistBackendError:
        return DistBackendError(
            f"the operation was not complete after {timeout.total_seconds():g} s: another rank has not done its part"
        )


class CollectiveWork(_EchelonWork):
    """A collective in a lane's queue."""

    __slots__ = ("_arguments", "_done", "_function", "note")

    def __init__(
        self,
        outputs: list[Tensor],
        note: Note,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        ordering: Ordering | None = None,
        record: Record | None = None,
    ) -> None:
        super().__init__(outputs, ordering, record)
        self.note = note
        self._function: Callable[..., None] | None = function
        self._arguments = arguments
        self._done = allocate_lock()
        self._done.acquire()

    @classmethod
    def done(cls, outputs: list[Tensor]) -> CollectiveWork:
        """A work that is over already."""
        work = cls(outputs, (0, 0), lambda: None, ())
        work.finish()
        return work

    def run(self) -> None:
        """Do it, in the lane's thread; an error is kept for those who wait."""
        assert self._function is not None
        try:
            self._function(*self._arguments)
        except BaseException as error:
            self._error = error
        self._function, self._arguments = None, ()  # what it held on to may be large

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self._done.release()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._finished:
            seconds = min(timeout.total_seconds(), threading.TIMEOUT_MAX) if timeout > _NO_TIMEOUT else -1
            with self._blocked():
                if not self._done.acquire(timeout=seconds):
                    raise self._timed_out(timeout)
            self._done.release()
        return self._close_wait()


class MessageWork(_EchelonWork):
    """A send or a receive. Whoever waits drives MPI; behind, the post office looks after messages nobody waits for."""

    __slots__ = ("_arrived", "_guard", "_held", "_request", "label", "waited_for")

    def __init__(
        self,
        outputs: list[Tensor],
        label: Any,
        request: Request,
        held: Any,
        arrived: Callable[[], object] | None = None,
        ordering: Ordering | None = None,
        record: Record | None = None,
    ) -> None:
        """`label` tells what it is, for reports; `held` is in use until the end; `arrived` runs once then."""
        super().__init__(outputs, ordering, record)
        self.label = label
        self.waited_for = 0  # a number of its own, once somebody waits without a timeout of his own
        self._request = request
        self._held = held
        self._arrived = arrived
        self._guard = allocate_lock()  # a request may be waited for or tested by one thread at a time

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._finished:
            with self._blocked():
                if timeout > _NO_TIMEOUT:
                    if not completes(self.poll, timeout):
                        raise self._timed_out(timeout)
                else:
                    self.waited_for = next(_numbers)
                    with self._guard:
                        if not self._finished:
                            self._settle(self._request.wait)
        return self._close_wait()

    def poll(self) -> bool:
        """Complete the message if it can be, without waiting; True once it is."""
        if not self._finished and self._guard.acquire(False):
            try:
                if not self._finished:
                    self._settle(self._request.test)
            finally:
                self._guard.release()
        return self._finished

    def is_completed(self) -> bool:
        return self.poll() and super().is_completed()

    def _source_rank(self) -> int:
        return self._request.source()

    source_rank = _source_rank

    def _settle(self, step: Callable[[], bool | None]) -> None:
        try:
            if step() is False:
                return
            if self.ordering is not None:
                self.ordering.run(self._outputs, self._arrived or _nothing)
            elif self._arrived is not None:
                self._arrived()
        except Exception as error:
            self._error = error
        self._held = self._arrived = None
        if self._record is not None:
            self._record.ended = now()
        self.finish()


class PostOffice:
    """Sees to messages that nobody is waiting for: MPI moves large ones only while somebody calls it.

    It looks every millisecond while messages are under way; more often would take time from those who wait themselves.
    """

    _INTERVAL = 1e-3
    _LINGER = 50  # empty rounds before it sleeps, so that a stream of messages need not wake it each time

    def __init__(self) -> None:
        self._under_way: list[MessageWork] = []
        self._in_hand: list[MessageWork] = []  # while they are looked at
        self._lock = threading.Lock()
        self._wake = threading.Semaphore(0)
        self._asleep = True
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, work: MessageWork) -> None:
        with self._lock:
            self._under_way.append(work)
            wake, self._asleep = self._asleep, False
        if wake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="echelon-messages", daemon=True)
                self._thread.start()
            self._wake.release()

    def waited_for(self) -> list[MessageWork]:
        """The messages under way that somebody waits for."""
        with self._lock:
            return [work for work in (*self._under_way, *self._in_hand) if work.waited_for and not work.is_finished]

    def close(self) -> None:
        """Look after nothing any more."""
        self._closed = True
        if self._thread is not None:
            self._wake.release()
            self._thread.join()

    def _serve(self) -> None:
        while not self._closed:
            self._wake.acquire()
            idle = 0
            while idle < self._LINGER and not self._closed:
                time.sleep(self._INTERVAL)
                with self._lock:
                    self._in_hand, self._under_way = self._under_way, []
                waiting = [work for work in self._in_hand if not work.poll()]
                with self._lock:
                    self._under_way += waiting
                    self._in_hand = []
                    idle = 0 if self._under_way else idle + 1
                    self._asleep = idle >= self._LINGER


def _nothing() -> None:
    pass


@cache
def _callback_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="echelon-futures")
