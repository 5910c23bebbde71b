"""The server's paths: those of OpenAI under /v1, and /health, /metrics, the page at / and its figures at /live."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from echelon.serve.answers import Reply, event
from echelon.serve.errors import ApiError, answer_errors, as_api_error, ended
from echelon.serve.guard import Guard
from echelon.serve.jobs import Gone, Job, Jobs, unless_gone
from echelon.serve.protocol import read
from echelon.serve.request import BadRequest, EngineFailed

if TYPE_CHECKING:
    from echelon.serve.engine import Engine

MAX_BODY = 16 * 2**20  # bytes
_DROPPED = 4  # how many times that is read, and dropped, before an answer: many clients send all before they listen
_LOG = logging.getLogger(__name__)


def make_app(
    engine: Engine, *, api_key: str | None = None, max_body: int = MAX_BODY, names: Collection[str] | None = None
) -> FastAPI:
    """`names`: by which alone, where there is no key, the server lets itself be called (None: any)."""
    app = FastAPI(title="Echelon", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Guard, api_key=api_key, names=names)
    answer_errors(app)
    jobs = Jobs(engine)
    app.state.jobs = jobs
    since = int(time.time())
    page, policy = _page()

    async def answer(request: Request, chat: bool) -> Response:
        try:
            return await answer_who_stays(request, chat)
        except Gone:
            return Response(status_code=400)  # which nobody reads

    async def answer_who_stays(request: Request, chat: bool) -> Response:
        if jobs.closing:
            raise ended()
        asked = read(await _body(request, max_body), chat, engine.name)
        prompts = asked.prompts
        if chat:
            prompts = (await asyncio.to_thread(engine.text.chat, [dict(said) for said in asked.messages]),)
        try:
            job = await jobs.open(prompts, asked.params, asked.priority)
        except BadRequest as error:
            if chat and error.parameter == "prompt":  # which the messages became
                error.parameter = "messages"
            raise
        reply = Reply(asked, engine.name, engine.text, job.prompts)
        if asked.stream:
            return Events(jobs, job, reply)
        try:
            return JSONResponse(await unless_gone(request.receive, _whole(job, reply)))
        finally:
            jobs.end(job)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat=True)

    def about() -> dict[str, Any]:
        told = {"id": engine.name, "object": "model", "created": since, "owned_by": "echelon"}
        return {**told, "max_model_len": engine.context}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != engine.name:
            message = f"the model {name!r} is not here: this server has {engine.name!r}"
            raise ApiError(404, message, parameter="model", code="model_not_found")
        return about()

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, str]:
        if engine.failed is not None:
            raise EngineFailed("see the server's log")
        if jobs.closing:
            raise ended()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = engine.metrics.render(engine.name)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/live")
    async def live() -> dict[str, Any]:
        return {"model": engine.name, "context": engine.context, **engine.metrics.snapshot()}

    @app.get("/")
    async def try_it() -> Response:
        return HTMLResponse(page, headers=policy)

    return app


class Events(Response):
    """A stream of events. It ends well with [DONE], and badly with an event that holds an error."""

    def __init__(self, jobs: Jobs, job: Job, reply: Reply) -> None:
        super().__init__(media_type="text/event-stream")
        self._jobs, self._job, self._reply = jobs, job, reply
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # or a proxy would gather the events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except Gone:
            pass  # nobody is left to be told
        finally:
            self._jobs.end(self._job)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events()) as events:
            async for made in events:
                await send({"type": "http.response.body", "body": made, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._job.pieces()) as pieces:
                async for at, piece in pieces:
                    made = self._reply.events(at, piece)
                    if made:
                        yield made
            yield self._reply.last_events()
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                _LOG.exception("a stream ended with an error")
            yield event(told.body())


async def _whole(job: Job, reply: Reply) -> dict[str, Any]:
    async with aclosing(job.pieces()) as pieces:
        async for at, piece in pieces:
            reply.take(at, piece)
    return reply.whole()


async def _body(request: Request, most: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    close = {"Connection": "close"}  # the rest of the body is not read
    if kind != "application/json":  # which no other site's page can send without being asked for leave
        raise ApiError(415, f"send the header 'Content-Type: application/json', not {kind!r}", headers=close)
    read, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= most:
                read.append(part)
            elif size > _DROPPED * most:
                break
    except (ClientDisconnect, asyncio.CancelledError):  # the server ends, and waits no more for the rest
        raise Gone from None
    if size > most:
        raise ApiError(413, f"the body has more than {most} bytes", code="body_too_large", headers=close)
    return b"".join(read)


def _page() -> tuple[str, dict[str, str]]:
    """The page, and headers that let only its own script run and talk only to this server."""
    page = files("echelon.serve").joinpath("page.html").read_text()
    found = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    if found is None:
        raise ValueError("page.html has no script")
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
    policy += "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return page, headers
