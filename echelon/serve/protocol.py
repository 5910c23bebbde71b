"""What a client may ask over HTTP, in OpenAI's words, turned into what the engine takes.

`SamplingParams` itself refuses numbers that make no sense; here stands the rest. A name that nobody knows is refused,
since a misspelt one would otherwise be answered with something else than was asked. What OpenAI has and this server
has not is refused too, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic_core import from_json

from echelon.models.presets import nearest
from echelon.serve.errors import ApiError
from echelon.serve.request import BadRequest, SamplingParams

Prompt = str | list[int]
Body = Mapping[str, Any]
MOST_PROMPTS, MOST_ANSWERS, MOST_MESSAGES = 256, 1024, 4096

_SAMPLING = frozenset(field.name for field in fields(SamplingParams)) - {"stop", "logprobs", "max_tokens"}
_SHARED = _SAMPLING | {"model", "stop", "logprobs", "max_tokens", "stream", "stream_options", "priority"}
_COMPLETION = _SHARED | {"prompt", "echo", "best_of"}
_CHAT = _SHARED | {"messages", "max_completion_tokens", "top_logprobs"}
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
)
_NOTHING: dict[str, tuple[Any, ...]] = {  # what OpenAI has and this server has not: the values that do not ask for it
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One HTTP request: each prompt has `params.n` answers."""

    chat: bool
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, str], ...] = ()  # of a chat, instead of prompts
    params: SamplingParams
    stream: bool
    usage: bool  # tell it at the end of a stream
    echo: bool = False
    priority: int


def read(raw: bytes, chat: bool, model: str) -> Asked:
    """Raises `BadRequest`, or `ApiError` for another model than this."""
    body = _json(raw)
    _refuse_unknown(body, _CHAT if chat else _COMPLETION)
    named = body.get("model")
    if not isinstance(named, str):
        raise BadRequest(f"model must name the model: this server has {model!r}", "model")
    if named != model:
        message = f"the model {named!r} is not here: this server has {model!r}"
        raise ApiError(404, message, parameter="model", code="model_not_found")
    stream = _boolean(body, "stream")
    common: dict[str, Any] = {
        "stream": stream,
        "usage": _wants_usage(body, stream),
        "priority": _whole(body, "priority", -(2**31), 2**31 - 1) or 0,
    }
    return _chat(body, common) if chat else _completion(body, common)


def _completion(body: Body, common: dict[str, Any]) -> Asked:
    prompts = _prompts(body.get("prompt"))
    most = body.get("max_tokens")
    params = _params(body, max_tokens=16 if most is None else most, logprobs=body.get("logprobs"))
    if params.n * len(prompts) > MOST_ANSWERS:
        raise BadRequest(f"{len(prompts)} prompts with n = {params.n}: {MOST_ANSWERS} answers are the most", "n")
    best = body.get("best_of")
    if best is not None and (best != params.n or isinstance(best, bool)):
        raise BadRequest(f"best_of is not supported, unless it is n, here {params.n}: leave it out", "best_of")
    echo = _boolean(body, "echo")
    if echo and params.logprobs is not None:
        raise BadRequest("echo with logprobs is not supported: those of a prompt's tokens are not known", "echo")
    return Asked(chat=False, prompts=prompts, params=params, echo=echo, **common)


def _chat(body: Body, common: dict[str, Any]) -> Asked:
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise BadRequest("max_tokens is the old name of max_completion_tokens: give one of them", "max_tokens")
    with_logprobs, top = _boolean(body, "logprobs"), body.get("top_logprobs")
    if top is not None and not with_logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    try:
        logprobs = (0 if top is None else top) if with_logprobs else None
        params = _params(body, max_tokens=limits[0] if limits else None, logprobs=logprobs)
    except BadRequest as error:
        if error.parameter != "logprobs":
            raise
        raise BadRequest(f"top_{error}", "top_logprobs") from None
    return Asked(chat=True, messages=_messages(body.get("messages")), params=params, **common)


def _json(raw: bytes) -> Body:
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest('the body must be a JSON object, as {"model": …}')
    return body


def _refuse_unknown(body: Body, known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known or name in _IGNORED:
            continue
        if name in _NOTHING:
            if value is not None and value not in _NOTHING[name]:
                raise BadRequest(f"{name} is not supported by this server: leave it out", name)
            continue
        raise BadRequest(
            f"there is no parameter {name!r}{nearest(name, known)}; there are {', '.join(sorted(known))}", name
        )


def _params(body: Body, **given: Any) -> SamplingParams:
    told = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()
    if stop is not None and not isinstance(stop, str | list):
        raise BadRequest("stop must be a text or a list of texts", "stop")
    for name, value in {**told, **given}.items():
        if isinstance(value, int) and abs(value) >= 2**64:  # which no float holds
            raise BadRequest(f"{name} is far too large", name)
    return SamplingParams(**told, **given, stop=stops)


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("prompt must be a text, a list of texts, a list of tokens, or a list of such lists", "prompt")
    if _are_tokens(prompt):
        return (prompt,)
    if len(prompt) > MOST_PROMPTS:
        raise BadRequest(f"prompt is a list of {len(prompt)} prompts: {MOST_PROMPTS} are the most", "prompt")
    if all(isinstance(each, str) for each in prompt) or all(_are_tokens(each) for each in prompt):
        return tuple(prompt)
    raise BadRequest("a list of prompts must have only texts in it, or only lists of tokens, none empty", "prompt")


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and 0 <= each < 2**31 for each in value)


def _messages(messages: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest('messages must be a list with at least one {"role": …, "content": …} in it', "messages")
    if len(messages) > MOST_MESSAGES:
        raise BadRequest(f"messages has {len(messages)} in it: {MOST_MESSAGES} are the most", "messages")
    return tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages))


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise BadRequest(f'{where} must be an object with "role" and "content"', where)
    for name, value in message.items():
        if name not in ("role", "content", "name") and value:
            raise BadRequest(f"{where}.{name} is not supported: a message has a role, a content and a name", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}.role is {role!r}: it must be one of {', '.join(_ROLES)}", f"{where}.role")
    said = {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise BadRequest(f"{where}.name must be a text", f"{where}.name")
    return said if name is None else {**said, "name": name}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where} must be a text, or a list of parts of type text", where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f'{where} may only have parts {{"type": "text", "text": …}}: the model reads text', where)
    return "".join(part["text"] for part in content)


def _wants_usage(body: Body, stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    if not stream:
        raise BadRequest("stream_options needs stream to be true", "stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise BadRequest(f"stream_options has no {name!r}: there is include_usage", f"stream_options.{name}")
    return _boolean(options, "include_usage", "stream_options.")


def _boolean(body: Body, name: str, where: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{where}{name} must be true or false, not {value!r}", f"{where}{name}")
    return bool(value)


def _whole(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise BadRequest(f"{name} must be a whole number from {low} to {high}, not {value!r}", name)
    return value
