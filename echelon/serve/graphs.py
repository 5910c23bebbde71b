"""Kernels that are launched as one, however many there are: CUDA graphs, cut where something cannot be captured.

What ranks exchange goes through the process group, over whatever road it chooses, and mostly over the host. So where a
split model's ranks meet (`parallel.shards.Meeting`) a graph ends; the exchange is done as always; the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from echelon.parallel.shards import Meeting


class Captures:
    """What graphs that are replayed one after another can share: memory, and a stream to be captured on."""

    def __init__(self) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


class Graph:
    """What `compute` launches. Its input lies where it was during the capture, and so does what it returns."""

    def __init__(self, compute: Callable[[], Tensor], captures: Captures, meeting: Meeting | None) -> None:
        self._pieces: list[Callable[[], object]] = []
        self._pool = captures.pool
        here, beside = torch.cuda.current_stream(), captures.stream
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            self._begin()
            try:
                with nullcontext() if meeting is None else meeting.around(self._cut):
                    self._out = compute()
                self._end()
            except BaseException:
                with suppress(RuntimeError):  # nothing can be captured any more; but others may want to
                    self._graph.capture_end()
                raise
        here.wait_stream(beside)
        self.replay()  # the first time a graph is launched it goes to the device, which takes time and memory

    def replay(self) -> Tensor:
        for piece in self._pieces:
            piece()
        return self._out

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self._pieces.append(self._graph.replay)

    def _cut(self, exchange: Callable[[], object]) -> None:
        self._end()
        exchange()
        self._pieces.append(exchange)
        self._begin()
