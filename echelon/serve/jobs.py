"""The requests that are being answered: each ends when its client leaves, and all of them when the server must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from echelon.serve.errors import ended
from echelon.serve.protocol import Prompt
from echelon.serve.request import BadRequest, Piece, SamplingParams

if TYPE_CHECKING:
    from echelon.serve.engine import Engine
    from echelon.serve.stream import Stream

T = TypeVar("T")


class Gone(Exception):
    """The client has left."""


class Job:
    """The prompts of one HTTP request, all in the engine at once."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self.prompts = [stream.prompt for stream in streams]

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Each piece with the place of its prompt; at the end an error, if the engine cut answers off."""
        is_cut = False
        async with aclosing(_merged(self._streams)) as pieces:
            async for at, piece in pieces:
                if piece.finish == "cancelled":
                    is_cut, piece.finish = True, None
                if piece.tokens or piece.finish:
                    yield at, piece
        if is_cut:
            raise ended()


class Jobs:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: set[Job] = set()
        self._nothing_left = asyncio.Event()
        self.closing = False

    async def open(self, prompts: Sequence[Prompt], params: SamplingParams, priority: int) -> Job:
        """Into the engine with all of them, or with none. Must be followed by `end`."""
        most = self._engine.settings.most_waiting
        if len(prompts) > most:
            raise BadRequest(f"{len(prompts)} prompts, but no more than {most} may wait here: send fewer", "prompt")
        encode = self._engine.text.encode
        tokens = [await asyncio.to_thread(encode, each) if isinstance(each, str) else each for each in prompts]
        if self.closing:
            raise ended()
        streams: list[Stream] = []
        try:
            for each in tokens:
                streams.append(self._engine.open(each, params, priority))
        except BaseException:
            Job(streams).cancel()
            raise
        job = Job(streams)
        self._live.add(job)
        return job

    def end(self, job: Job) -> None:
        job.cancel()
        self._live.discard(job)
        if self.closing and not self._live:
            self._nothing_left.set()

    async def drain(self, seconds: float) -> int:
        """Take no more, and let the live ones end; those that have not by then are cancelled, and counted."""
        self.closing = True
        if not self._live:
            return 0
        try:
            await asyncio.wait_for(self._nothing_left.wait(), seconds)
        except TimeoutError:
            left = list(self._live)
            for job in left:
                job.cancel()
            return len(left)
        return 0


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but if the client leaves meanwhile, end it and raise `Gone`."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Gone
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Piece], None]:
    if len(streams) == 1:
        async for piece in streams[0]:
            yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def follow(at: int, stream: Stream) -> None:
        try:
            async for piece in stream:
                arrived.put_nowait((at, piece))
            arrived.put_nowait((at, None))
        except Exception as error:
            arrived.put_nowait((at, error))

    followers = [asyncio.ensure_future(follow(at, stream)) for at, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            at, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield at, item
    finally:
        for follower in followers:
            follower.cancel()
