"""A request's answers on their way from the engine's thread to whoever asked.

The engine adds tokens, which takes it next to nothing; whoever reads makes text of them (and the engine only where it
looks for a text at which to stop). What has come since somebody last read is one piece: a token as a rule, and more
where the reader is slower than the engine. So many readers, who all share Python with the engine, do not hold it up;
and an answer that is read only at its end is decoded at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import chain

from echelon.serve.request import Answer, Choice, Finish, Logprob, Piece, SamplingParams
from echelon.serve.text import Text, Writer

_Waiting = threading.Event | tuple[asyncio.AbstractEventLoop, asyncio.Event]


class _Unread:
    """What has come of one answer."""

    __slots__ = ("finish", "logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.finish: Finish | None = None


class Stream:
    """One request's pieces, as they come; an iterator for `async for`, and for a plain `for` in another thread."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        text: Text,
        ends: frozenset[int],
        on_cancel: Callable[[], object],
    ) -> None:
        self.prompt, self.params = prompt, params
        self.ends = ends  # tokens: each ends an answer, and is no part of its text
        self.is_cancelled = False
        self.cached = 0  # of the prompt's tokens, those that were taken from the cache
        self._writers = [Writer(text, params.stop, prompt) for _ in range(params.n)]
        self._open = params.n  # answers that have not ended
        self._unread: dict[int, _Unread] = {}
        self._failure: BaseException | None = None
        self._pieces: list[Piece] = []  # that were made, the next one last
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None
        self._on_cancel = on_cancel

    def cancel(self) -> None:
        """Nobody wants the rest. It may be called at any time, and twice."""
        self.is_cancelled = True
        self._on_cancel()

    def add(self, index: int, token: int, logprob: Logprob | None = None, finish: Finish | None = None) -> None:
        """The next token of an answer; `wake` must follow."""
        with self._lock:
            unread = self._unread.get(index)
            if unread is None:
                unread = self._unread[index] = _Unread()
            unread.tokens.append(token)
            if logprob is not None:
                unread.logprobs.append(logprob)
            if finish is not None:
                unread.finish = finish

    def cut(self, index: int) -> None:
        """An answer that was cancelled has ended; `wake` must follow."""
        with self._lock:
            self._unread.setdefault(index, _Unread()).finish = "cancelled"

    def fail(self, failure: BaseException) -> None:
        """After what has come, nothing more will; `wake` must follow."""
        with self._lock:
            self._failure = failure

    def __iter__(self) -> Iterator[Piece]:
        came = threading.Event()
        while self._open:
            while (piece := self._next(came)) is None:
                came.wait()
                came.clear()
            yield piece

    async def __aiter__(self) -> AsyncIterator[Piece]:
        came = asyncio.Event()
        waiting = asyncio.get_running_loop(), came
        while self._open:
            while (piece := self._next(waiting)) is None:
                await came.wait()
                came.clear()
            yield piece

    def _next(self, waiting: _Waiting) -> Piece | None:
        if not self._pieces:
            with self._lock:
                unread, self._unread = self._unread, {}
                if not unread and self._failure is None:
                    self._waiting = waiting
                    return None
            if not unread and self._failure is not None:
                self._open = 0
                raise self._failure
            self._pieces = [self._piece(index, each) for index, each in reversed(unread.items())]
        piece = self._pieces.pop()
        self._open -= piece.finish is not None
        return piece

    def _piece(self, index: int, unread: _Unread) -> Piece:
        writer, tokens, finish = self._writers[index], unread.tokens, unread.finish
        text = writer.write(tokens[:-1] if tokens and tokens[-1] in self.ends else tokens)
        if finish is not None:
            text += writer.finish()
        return Piece(index, text, tuple(tokens), tuple(unread.logprobs), finish, self.cached)


def wake(streams: Iterable[Stream], told: Callable[[], object] | None = None) -> None:
    """Whoever waits for one of them. An event loop is called once for all of its readers, and calls `told` when they
    have read.
    """
    loops: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Event]] = defaultdict(list)
    for stream in streams:
        with stream._lock:
            waiting, stream._waiting = stream._waiting, None
        if isinstance(waiting, threading.Event):
            waiting.set()
        elif waiting is not None:
            loops[waiting[0]].append(waiting[1])
    for loop, events in loops.items():
        with contextlib.suppress(RuntimeError):  # the event loop that waited is gone
            loop.call_soon_threadsafe(_set, events, told)


def _set(events: Sequence[asyncio.Event], told: Callable[[], object] | None) -> None:
    for event in events:
        event.set()
    if told is not None:
        asyncio.get_running_loop().call_soon(told)  # behind all of these


def collect(stream: Stream, pieces: Sequence[Piece]) -> Answer:
    """The whole answer to a request, from its pieces."""
    choices = []
    for index in range(stream.params.n):
        mine = [piece for piece in pieces if piece.index == index]
        finish = mine[-1].finish
        assert finish is not None
        tokens = tuple(chain.from_iterable(piece.tokens for piece in mine))
        logprobs = tuple(chain.from_iterable(piece.logprobs for piece in mine))
        choices.append(Choice("".join(piece.text for piece in mine), tokens, logprobs, finish))
    return Answer(stream.prompt, tuple(choices), stream.cached)
