"""The least of HTTP/1.1 that a benchmark of streamed answers needs, over asyncio's streams.

What is measured is when bytes arrive, so nothing stands between the socket and the clock. Connections are kept and used
again: a handshake would otherwise be part of every first token.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

_SECONDS_TO_CONNECT = 10.0


class Failed(RuntimeError):
    """A request that was not answered, and why; with the status, if the server gave one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """One request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request, and read the answer up to its body."""
        self.writer.write(head + body)
        await self.writer.drain()
        words = (await self._line()).split(None, 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise Failed(f"the server does not speak HTTP/1: it says {' '.join(words)!r}")
        self.status, self.headers = int(words[1]), {}
        while line := await self._line():
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()

    async def body(self) -> AsyncGenerator[bytes, None]:
        """As it comes."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := int((await self._line()).split(";")[0], 16):
                yield await self.reader.readexactly(size)
                await self._line()
            while await self._line():  # trailers
                pass
        elif "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        else:
            while part := await self.reader.read(65536):
                yield part

    @property
    def stays(self) -> bool:
        """Whether another request can follow, once the body has been read."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        return framed and self.headers.get("connection", "").lower() != "close"

    async def _line(self) -> str:
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise asyncio.IncompleteReadError(line, None)
        return line.rstrip(b"\r\n").decode("latin-1")


class Client:
    """Requests to one server; `url` is its address, with what stands before every path."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://host:port")
        self.url, self._prefix = url, parts.path.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*"} | headers
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        text = b"".join([part async for part in self._answer("GET", path, b"")])
        try:
            return json.loads(text)
        except ValueError:
            raise Failed(f"{self.url}{path} answers with no JSON: {_beginning(text)}") from None

    async def post(self, path: str, content: dict[str, Any]) -> AsyncGenerator[str, None]:
        """The data of the events with which the server answers, each when it has come whole."""
        events = Events()
        async for part in self._answer("POST", path, json.dumps(content).encode()):
            for data in events.feed(part):
                yield data

    async def close(self) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def _answer(self, method: str, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        connection = await self._asked(method, path, content)
        whole = False
        try:
            if connection.status != 200:
                text = b"".join([part async for part in connection.body()])
                raise Failed(f"HTTP {connection.status}: {_reason(text)}", connection.status)
            async for part in connection.body():
                yield part
            whole = True
        except asyncio.IncompleteReadError:
            raise Failed("the server ended the connection in the middle of its answer") from None
        finally:
            if whole and connection.stays:
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _asked(self, method: str, path: str, content: bytes) -> Connection:
        """A connection on which the request was sent. One that was kept may have ended meanwhile: then another."""
        lines = [
            f"{method} {self._prefix}{path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in self._headers.items()),
        ]
        if content:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.ask(head, content)
                return connection
            except (ConnectionError, asyncio.IncompleteReadError):
                connection.writer.close()
        connection = await self._connect()
        try:
            await connection.ask(head, content)
        except asyncio.IncompleteReadError:
            connection.writer.close()
            raise Failed("the server ended the connection without an answer") from None
        except BaseException:
            connection.writer.close()
            raise
        return connection

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(_SECONDS_TO_CONNECT):
                return Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._ssl))
        except TimeoutError:
            raise Failed(f"no connection to {self.url} in {_SECONDS_TO_CONNECT:.0f} seconds") from None
        except OSError as error:
            raise Failed(f"no connection to {self.url}: {error}") from None


class Events:
    """Server-sent events out of bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, part: bytes) -> list[str]:
        """The data of the events that this part completes."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        found = []
        for line in lines:
            text = line.rstrip(b"\r").decode(errors="replace")
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                found.append("\n".join(self._data))
                self._data = []
        return found


def _reason(text: bytes) -> str:
    """What an OpenAI-compatible server says is wrong, or the beginning of what another says."""
    try:
        told = json.loads(text)
        told = told.get("error", told)
        return str(told["message"] if isinstance(told, dict) and "message" in told else told)
    except (ValueError, AttributeError):
        return _beginning(text)


def _beginning(text: bytes) -> str:
    return text[:200].decode(errors="replace").strip() or "(nothing)"
