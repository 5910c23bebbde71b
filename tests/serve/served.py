"""A server on a free port, in this process, with a tiny model of random weights behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import torch
import uvicorn

from echelon.models.llama import LlamaConfig
from echelon.models.presets import build
from echelon.serve.api import make_app
from echelon.serve.engine import Engine
from echelon.serve.server import listen
from echelon.serve.settings import Settings

MODEL = "tiny"


def tiny_engine(**settings: Any) -> Engine:
    torch.manual_seed(0)
    shape = LlamaConfig(vocabulary=256, context=4096, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=64)
    return Engine(build(shape).eval(), settings=Settings(cache_gib=0.05, **settings), name=MODEL)


@dataclass
class Served:
    engine: Engine
    url: str
    jobs: Any
    loop: asyncio.AbstractEventLoop

    plain: httpx2.Client

    def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return self.plain.post(path, json={"model": MODEL, **body})

    def live(self) -> dict[str, Any]:
        return self.engine.metrics.snapshot()


@contextmanager
def served(engine: Engine, **options: Any) -> Iterator[Served]:
    app = make_app(engine, **options)
    listener = listen(port=0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=5))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([listener]),))
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        until(lambda: server.started)
        with httpx2.Client(base_url=url, timeout=30) as plain:
            yield Served(engine, url, app.state.jobs, loop, plain)
    finally:
        server.should_exit = True
        thread.join()
        loop.close()
        engine.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny_engine()) as made:
        yield made


def until(is_so: Callable[[], Any], seconds: float = 20) -> Any:
    """What it says, once that is true."""
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)
    return found
