"""A request's answers on their way from the engine's thread to whoever asked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial

from echelon.serve.request import Answer, Choice, Piece, SamplingParams


class Stream:
    """One request's pieces, as they come; an iterator for `async for`, and for a plain `for` in another thread."""

    def __init__(self, prompt: tuple[int, ...], params: SamplingParams, on_cancel: Callable[[], object]) -> None:
        self.prompt, self.params = prompt, params
        self.is_cancelled = False
        self._open = params.n  # answers that have not ended
        self._items: deque[Piece | BaseException] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], object] | None = None
        self._on_cancel = on_cancel

    def cancel(self) -> None:
        """Nobody wants the rest. It may be called at any time, and twice."""
        self.is_cancelled = True
        self._on_cancel()

    def put(self, item: Piece | BaseException) -> None:
        with self._lock:
            self._items.append(item)
            wake = self._wake
        if wake is not None:
            with contextlib.suppress(RuntimeError):  # the event loop that waited is gone
                wake()

    def __iter__(self) -> Iterator[Piece]:
        while self._open:
            event = threading.Event()
            while (item := self._next(event.set)) is None:
                event.wait()
                event.clear()
            yield self._taken(item)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[Piece]:
        loop = asyncio.get_running_loop()
        while self._open:
            event = asyncio.Event()
            while (item := self._next(partial(loop.call_soon_threadsafe, event.set))) is None:
                await event.wait()
                event.clear()
            yield self._taken(item)

    def _next(self, wake: Callable[[], object]) -> Piece | BaseException | None:
        with self._lock:
            self._wake = None if self._items else wake
            return self._items.popleft() if self._items else None

    def _taken(self, item: Piece | BaseException) -> Piece:
        if isinstance(item, BaseException):
            self._open = 0
            raise item
        self._open -= item.finish is not None
        return item


def collect(stream: Stream, pieces: Sequence[Piece]) -> Answer:
    """The whole answer to a request, from its pieces."""
    choices = []
    for index in range(stream.params.n):
        mine = [piece for piece in pieces if piece.index == index]
        finish = mine[-1].finish
        assert finish is not None
        tokens = tuple(token for piece in mine for token in piece.tokens)
        logprobs = tuple(each for piece in mine for each in piece.logprobs)
        choices.append(Choice("".join(piece.text for piece in mine), tokens, logprobs, finish))
    return Answer(stream.prompt, tuple(choices), max(piece.cached for piece in pieces))
