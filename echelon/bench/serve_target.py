"""What is measured by `echelon bench serve`: a server behind an OpenAI-compatible URL, or an engine in this process.

Both send a request and yield what comes back, with the time at which it came.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from echelon.bench.serve_client import Client, Failed
from echelon.bench.serve_load import Request
from echelon.serve.request import SamplingParams

if TYPE_CHECKING:
    from echelon.serve.engine import Engine

Clock = Callable[[], float]
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Chunk:
    """One arrival: as a rule a token, though a server may send several together."""

    seconds: float  # on the clock
    text: str


@dataclass(frozen=True)
class Usage:
    """How many tokens there were, as the one who answers has counted."""

    prompt_tokens: int
    output_tokens: int


class Target(Protocol):
    model: str

    def send(self, request: Request) -> AsyncGenerator[Chunk | Usage, None]: ...

    async def close(self) -> None: ...


class Server:
    """`backend` says which of OpenAI's two ways of asking; `sampling` is sent along as it is."""

    def __init__(self, client: Client, backend: str, endpoint: str, model: str, sampling: dict[str, Any], clock: Clock):
        self.model = model
        self._client, self._chat, self._endpoint = client, backend == "openai-chat", endpoint or ENDPOINTS[backend]
        self._sampling, self._clock = sampling, clock

    @staticmethod
    async def find_model(client: Client, asked: str) -> str:
        """The model to ask for: the one given, or the first that the server has. It fails where no server is."""
        allow_many_connections()
        try:
            told = await client.get("/v1/models")
            names = [str(model["id"]) for model in told["data"]]
        except Failed as error:
            if error.status is None:
                raise
            if asked:  # of a server that is there, but does not list its models
                return asked
            if error.status in (401, 403):
                raise Failed(f"{client.url} does not let us in ({error}): give its key by --api-key") from None
            raise Failed(f"{client.url}/v1/models does not list models ({error}): name one with --model") from None
        except (KeyError, TypeError):
            raise Failed(f"{client.url}/v1/models does not list models: is this an OpenAI-compatible server?") from None
        if asked and asked not in names:
            raise Failed(f"{client.url} has no model {asked!r}: it has {', '.join(names) or 'none'}")
        if not names:
            raise Failed(f"{client.url} has no models")
        return asked or names[0]

    async def send(self, request: Request) -> AsyncGenerator[Chunk | Usage, None]:
        async with contextlib.aclosing(self._client.post(self._endpoint, self._body(request))) as events:
            async for data in events:
                seconds = self._clock()
                if data == "[DONE]":
                    continue
                told = json.loads(data)
                if "error" in told:
                    raise Failed(str(told["error"].get("message", told["error"])))
                text = self._text(told["choices"][0]) if told.get("choices") else None
                if text is not None:
                    yield Chunk(seconds, text)
                if usage := told.get("usage"):
                    yield Usage(usage["prompt_tokens"], usage["completion_tokens"])

    async def close(self) -> None:
        await self._client.close()

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        if self._chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
            body["max_completion_tokens"] = request.output_tokens
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.output_tokens
        return body | {"stream": True, "stream_options": {"include_usage": True}} | self._sampling

    def _text(self, choice: dict[str, Any]) -> str | None:
        """What a token added, which may be nothing; none if there was no token, as when only the role is told."""
        if not self._chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if text or ("content" in delta and "role" not in delta):
            return text or ""
        return None


class InProcess:
    """An engine of this process, without a server and its HTTP."""

    def __init__(self, engine: Engine, sampling: dict[str, Any], clock: Clock, *, chat: bool = False) -> None:
        self.model = engine.name
        self._engine, self._sampling, self._clock, self._chat = engine, sampling, clock, chat

    async def send(self, request: Request) -> AsyncGenerator[Chunk | Usage, None]:
        prompt = request.prompt
        if self._chat:
            prompt = tuple(self._engine.text.chat([{"role": "user", "content": prompt}]))
        stream = self._engine.open(prompt, SamplingParams(max_tokens=request.output_tokens, **self._sampling))
        tokens = 0
        try:
            async for piece in stream:
                tokens += len(piece.tokens)
                yield Chunk(self._clock(), piece.text)
        finally:
            stream.cancel()
        yield Usage(len(stream.prompt), tokens)

    async def close(self) -> None:
        self._engine.close()


def allow_many_connections() -> None:
    """As many as the system lets a user have: each request that runs is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
