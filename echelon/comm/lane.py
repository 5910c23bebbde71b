"""The order of collectives in one group.

MPI wants the collectives of a communicator called in one order on all ranks and never by two threads at once; PyTorch
lets each rank choose for itself whether a call is synchronous. So both kinds run the same blocking call, one at a
time: a synchronous one in the caller's thread if nothing is ahead of it, everything else in the lane's own worker
thread, in the order of the calls. A group has its own lane: waiting in one never delays another. What runs is noted in
the rank's logbook.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from echelon.comm.records import Record
from echelon.comm.streams import Ordering
from echelon.comm.work import CollectiveWork, Note
from echelon.launch.logbook import COUNT, ELEMENTS, KEPT, LAST, SEQUENCE, Logbook


class Lane:
    """Runs callables one at a time, in the order of submission."""

    def __init__(self, name: str, logbook: Logbook, row: int) -> None:
        self._name = name
        self._count = logbook.count
        self._rows = logbook.rows
        self._row = row
        self.baton = allocate_lock()  # held by whoever runs a collective
        self.pending: deque[CollectiveWork] = deque()  # queued or running in the worker
        self._arrivals: SimpleQueue[CollectiveWork | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._starting = allocate_lock()
        self._closed = ""

    def call(self, note: Note, function: Callable[..., None], *arguments: Any) -> None:
        """Run now in this thread, or, if others are ahead, after them."""
        if not self.try_call(note, function, *arguments):
            self.post([], note, function, *arguments).wait()

    def try_call(self, note: Note, function: Callable[..., None], *arguments: Any) -> bool:
        """Run now in this thread, if nothing is ahead."""
        if self.pending or not self.baton.acquire(False):
            return False
        place = self._begin(note)
        try:
            function(*arguments)
        finally:
            self._rows[place] = note[0]
            self.baton.release()
        return True

    def post(
        self,
        outputs: list[Any],
        note: Note,
        function: Callable[..., None],
        *arguments: Any,
        ordering: Ordering | None = None,
        record: Record | None = None,
    ) -> CollectiveWork:
        """Run in the worker thread, after all that was submitted before; the work's future will hold `outputs`."""
        self.check_open()
        work = CollectiveWork(outputs, note, function, arguments, ordering, record)
        self.pending.append(work)
        self._arrivals.put(work)
        if self._worker is None:
            self._start()
        return work

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._closed)

    def close(self, reason: str) -> None:
        """Finish what is queued; every later call raises `reason`."""
        if self._closed:
            return
        self._closed = reason
        if self._worker is not None and self._worker is not threading.current_thread():
            self._arrivals.put(None)
            self._worker.join()
        self.baton.acquire()  # for good: the fast path of `call` then always reaches `post`

    def abandon(self, reason: str) -> None:
        """Refuse every later call: for a forked child, which inherited the lane but not its worker."""
        self._closed = reason
        self.baton = allocate_lock()
        self.baton.acquire()

    def _begin(self, note: Note) -> int:
        """Write down that an operation is under way; returns where to write that it is over."""
        rows, row = self._rows, self._row
        number = rows[row + SEQUENCE] + 1
        place: int = row + LAST + number % KEPT
        rows[place] = note[0] + 1
        rows[row + ELEMENTS] = note[1]
        rows[row + COUNT] = next(self._count)
        rows[row + SEQUENCE] = number  # last: until then nobody takes the new one for an old one
        return place

    def _start(self) -> None:
        with self._starting:
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name=f"echelon-{self._name}", daemon=True)
                self._worker.start()

    @torch.inference_mode()  # as the caller may have been: what is communicated is memory, not a part of a graph
    def _serve(self) -> None:
        while (work := self._arrivals.get()) is not None:
            with self.baton:
                place = self._begin(work.note)
                work.run()
                self._rows[place] = work.note[0]
            self.pending.popleft()
            work.finish()
