"""For the tests of `echelon bench serve`: an event loop whose time jumps, and a small OpenAI-compatible server.

Where nothing is ready, the loop's clock goes at once to the next thing that is due. So waiting costs nothing, and what
a test measures is what was planned, to the last digit.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_ON_ITS_WAY = 0.005  # seconds in which bytes from one socket of this process reach another


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    jumped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(timeout if timeout is None else min(timeout, _ON_ITS_WAY))
        if not ready and timeout:
            self.jumped += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.jumped


def run(main: Callable[[Callable[[], float]], Coroutine[Any, Any, Any]]) -> Any:
    """`main` is given the clock."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main(runner.get_loop().time))


def completion(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def usage(prompt: int, answer: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": answer}}


@dataclass
class FakeServer:
    """Answers each POST with what `plan` makes of its body: pairs of (seconds to wait, what to send then). A `dict` is
    sent as an event, `bytes` as they are; an `int` is a status, with the error "no"; None ends the connection.
    """

    plan: Callable[[dict[str, Any]], list[tuple[float, Any]]]
    models: tuple[str, ...] = ("tiny",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    keep: bool = True  # connections after an answer
    url: str = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer) and self.keep:
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        method, path, _ = first.split()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
        self.paths.append(path)
        self.headers.append(headers)
        if method == "GET":
            text = json.dumps({"data": [{"id": name} for name in self.models]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            return True
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.bodies.append(body)
        begun = False
        for seconds, what in self.plan(body):
            await asyncio.sleep(seconds)
            if what is None:
                return False
            if isinstance(what, int):
                text = b'{"error": {"message": "no"}}'
                writer.write(b"HTTP/1.1 %d Not Good\r\nContent-Length: %d\r\n\r\n%s" % (what, len(text), text))
                return True
            if not begun:
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                begun = True
            part = what if isinstance(what, bytes) else b"data: %s\n\n" % json.dumps(what).encode()
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True


@contextmanager
def beside(fake: FakeServer) -> Any:
    """The server in a thread of its own, in real time, for a command that has its own loop."""
    loop, up = asyncio.new_event_loop(), threading.Event()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(fake.start())
        up.set()
        loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    up.wait()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
