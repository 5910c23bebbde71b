"""Runs the server until it is told to end, or the engine fails.

A first signal lets the live requests come to their end while new ones are told 503; a second one, or the time limit,
cuts them off. uvicorn's own way would close the door at once, so that clients could not tell an ending server from
a broken one.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from echelon.launch.say import say
from echelon.serve.api import MAX_BODY, make_app

if TYPE_CHECKING:
    from echelon.serve.engine import Engine
    from echelon.serve.jobs import Jobs

LOCAL = ("localhost", "127.0.0.1", "::1")
_LAST_WORDS = 5  # seconds for the last answers to be sent
_WATCH = 0.2  # seconds between looks at the engine
_LOG = logging.getLogger(__name__)


class CannotListen(ValueError):
    """The address is not to be had."""


def listen(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """Take the address, before the model is loaded; port 0: any that is free."""
    try:
        if not 0 <= port < 2**16:
            raise OSError(errno.EINVAL, "a port is a number from 0 to 65535")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # asyncio sends each token at once only on a socket that names its protocol, which create_server's does not
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    return CannotListen(f"cannot listen on {host}, port {port}: {error.strerror}; choose another --host or --port")


def serve(
    engine: Engine,
    listener: socket.socket,
    *,
    api_key: str | None = None,
    max_body: int = MAX_BODY,
    drain_seconds: float = 30,
    stop: Path | None = None,
    name: str = "",
) -> int:
    """Returns the exit code: 0 if it was told to end, by a signal or by the file `stop`, 1 if the engine failed. The
    caller closes the engine. `name` is what the host was asked for by, if it was.
    """
    return asyncio.run(_serve(engine, listener, api_key, max_body, drain_seconds, stop, name.lower()))


async def _serve(
    engine: Engine,
    listener: socket.socket,
    api_key: str | None,
    max_body: int,
    drain_seconds: float,
    stop: Path | None,
    name: str,
) -> int:
    host, port = listener.getsockname()[:2]
    local = ipaddress.ip_address(host).is_loopback
    if not local and not api_key:
        say(f"everyone who reaches {host} can use this server: give it an API key, or let it listen on 127.0.0.1")
    app = make_app(engine, api_key=api_key, max_body=max_body, names=(*LOCAL, host, name) if local else None)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=_LAST_WORDS,
    )
    server = _Server(config)
    told: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, told.put_nowait, each)
    serving = asyncio.ensure_future(server.serve([listener]))
    say(engine.how)
    print(f"serving {engine.name} at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)", flush=True)
    while told.empty() and engine.failed is None and not serving.done():
        await asyncio.sleep(_WATCH)
        if stop is not None and stop.exists():  # by which the command tells its ranks
            told.put_nowait(signal.SIGTERM)
    if engine.failed is None and not serving.done():
        await _drain(app.state.jobs, told, drain_seconds)
    if engine.failed is not None:
        _LOG.error("the engine failed", exc_info=engine.failed)
        say(f"the engine failed, so the server ends: {engine.failed}")
    server.should_exit = True
    await serving
    return 0 if engine.failed is None else 1


async def _drain(jobs: Jobs, told: asyncio.Queue[signal.Signals], seconds: float) -> None:
    name = told.get_nowait().name
    say(f"{name}: taking no more requests, and ending when the live ones have, at most {seconds:g} s from now")
    draining = asyncio.ensure_future(jobs.drain(seconds))
    again = asyncio.ensure_future(told.get())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not draining.done():
        draining.cancel()
        draining = asyncio.ensure_future(jobs.drain(0))
    cut = await draining
    if cut:
        say(f"requests that were cut off: {cut}")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Not here: they are caught above."""
        yield
