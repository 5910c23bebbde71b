"""Whatever is wrong with a request is said, and harms nobody: a few hundred wrong ones, and then a good one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.served import MODEL, Served, server  # noqa: F401 (a fixture)

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETION: {"model": MODEL, "prompt": "a", "max_tokens": 1},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
HUGE = 10**400
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLE = ("n", "seed", "top_k", "max_tokens", "priority")
NOT_NUMBERS: tuple[Any, ...] = ("1", "", True, [], [1], {}, {"a": 1})
OUTSIDE: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, -1, 101, 1e300, HUGE, -HUGE),
    "top_p": (0, -0.5, 1.0001, 5, HUGE),
    "min_p": (-0.1, 1.1, 2),
    "repetition_penalty": (0, -1, 1e9),
    "presence_penalty": (-101, 1000, HUGE),
    "frequency_penalty": (-101, 1000, HUGE),
    "n": (0, -1, 129, 10**9, HUGE, 1.5),
    "seed": (2**63, -(2**63) - 1, HUGE, 0.5),
    "top_k": (-1, 0.5, HUGE),
    "max_tokens": (0, -1, 10**9, 2**63, HUGE, 1.5),
    "priority": (2**31, -(2**40), 0.5),
}
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETION: {
        "prompt": (
            None, 1, 1.5, True, {}, [], [[]], [[], [1]], ["a", 1], [1, "a"], ["a", None], ["a", ["b"]], [[1], "a"],
            [[1, "a"]], [[["a"]]], [-1], [256], [1.5], [True], [10**30], [[1], [300]], "", [""], "x" * 5000,
            [65] * 4096, ["a"] * 257, {"text": "a"},
        ),
        "logprobs": ("1", -1, 21, True, 1.5, [], HUGE),
        "echo": (1, "true", []),
        "best_of": (2, 0, "1", True, 5),
        "suffix": ("end", 1, []),
        "max_completion_tokens": (1,),
        "messages": ([], [{"role": "user", "content": "a"}]),
    },
    CHAT: {
        "messages": (
            None, [], {}, "a", 1, [None], ["a"], [1], [[]], [{}], [{"role": "user"}], [{"content": "a"}],
            [{"role": "user", "content": None}], [{"role": "user", "content": 1}], [{"role": "user", "content": []}],
            [{"role": "user", "content": {}}], [{"role": "user", "content": ["a"]}], [{"role": 1, "content": "a"}],
            [{"role": "robot", "content": "a"}], [{"role": "tool", "content": "a"}], [{"role": [], "content": "a"}],
            [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"text": "a"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}],
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            [{"role": "user", "content": "a", "name": 1}], [{"role": "user", "content": "a", "contents": "b"}],
            [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
            [{"role": "user", "content": "x" * 5000}], [{"role": "user", "content": "a"}] * 4097,
        ),
        "logprobs": (1, "true", 5, []),
        "top_logprobs": (1, 0, "1"),  # without logprobs
        "tools": ([{"type": "function", "function": {"name": "f"}}], 1, "a"),
        "tool_choice": ("required", {"type": "function"}),
        "functions": ([{"name": "f"}],),
        "response_format": ({"type": "json_object"}, {"type": "json_schema"}, "text"),
        "modalities": (["audio"], ["text", "audio"]),
        "audio": ({"voice": "alloy"},),
        "reasoning_effort": ("high",),
        "max_completion_tokens": (0, -1, "1", 2),  # also another than max_tokens
        "prompt": ("a",),
    },
}  # fmt: skip
BOTH: dict[str, tuple[Any, ...]] = {
    "model": (None, 1, "", "other", [], {}, True, "x" * 3000),
    "stop": (1, True, {}, [1], [None], [""], "", ["a", ""], ["a"] * 17, [["a"]]),
    "stream": (1, "true", [], 0),
    "stream_options": ({}, {"include_usage": True}, [], 1, "a"),  # without stream
    "logit_bias": ({"50256": -100}, [], 1),
    "temprature": (1,),
    "maxtokens": (1,),
    "sampling_params": ({},),
    "": (1,),
    "__class__": ("a",),
}
RAW = (
    b"", b" ", b"null", b"1", b"true", b'"a"', b"[]", b"[{}]", b"{", b"}", b'{"model"', b'{"model": "tiny",}', b"{'a'}",
    b'{"model": "tiny", "prompt": "a"} x', b'{"model": "tiny", "prompt": NaN}', b'{"temperature": Infinity}', b"\x00",
    b'\xff\xfe{"a": 1}', b'\xef\xbb\xbf{"model": "tiny", "prompt": "a"}', b'{"model": "tiny", "prompt": "\xff"}',
    b'{"model": "tiny", "prompt": "\\ud800"}', b'{"model": "tiny", "prompt": "a", "stop": "\\udfff"}',
    b'{"model": "tiny", "prompt": "\n"}', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b"prompt=a&model=tiny",
    b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', b"<xml/>", b'{"model": "tiny"}',
    b'{"model": "tiny", "prompt": "a", "n": 99999999999999999999999999}',
)  # fmt: skip


def bodies() -> Iterator[tuple[str, bytes]]:
    for path, good in GOOD.items():
        for raw in RAW:
            yield path, raw
        wrong = {name: NOT_NUMBERS + OUTSIDE[name] for name in (*NUMBERS, *WHOLE)} | BOTH | WRONG[path]
        for name, values in wrong.items():
            for value in values:
                yield path, json.dumps({**good, name: value}).encode()
        for name in good:
            if name != "max_tokens":
                yield path, json.dumps({key: value for key, value in good.items() if key != name}).encode()
        for options in ({"include_usage": 1}, {"include_use": True}, [], "a"):
            yield path, json.dumps({**good, "stream": True, "stream_options": options}).encode()
        for stream in (False, True):  # wrong in another way, and asked for as a stream
            yield path, json.dumps({**good, "stream": stream, "max_tokens": 4096}).encode()
    yield COMPLETION, json.dumps({**GOOD[COMPLETION], "prompt": ["a"] * 100, "n": 11}).encode()
    yield COMPLETION, json.dumps({**GOOD[COMPLETION], "echo": True, "logprobs": 1}).encode()
    yield CHAT, json.dumps({**GOOD[CHAT], "logprobs": True, "top_logprobs": 21}).encode()
    yield CHAT, json.dumps({**GOOD[CHAT], "logprobs": True, "top_logprobs": "1"}).encode()


def test_every_wrong_request_is_answered_with_what_is_wrong(server: Served) -> None:  # noqa: F811
    seen = list(bodies())
    assert len(set(seen)) == len(seen) >= 200
    for path, body in seen:
        answer = server.plain.post(path, content=body, headers={"Content-Type": "application/json"})
        told = f"{path} {body[:200]!r}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code in (400, 404), told
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, told
        assert error["type"] == "invalid_request_error", told
        assert 10 < len(error["message"]) < 1000, told
    assert server.live()["running"] == server.live()["waiting"] == 0
    for path, good in GOOD.items():
        answer = server.post(path, good)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "more", "parameter", "words"),
    [
        (COMPLETION, {"temprature": 1}, "temprature", "(did you mean 'temperature'?)"),
        (COMPLETION, {"temperature": -1}, "temperature", "temperature is -1: it must be from 0 to 100"),
        (COMPLETION, {"prompt": "x" * 5000}, "prompt", "the prompt has 5000 tokens"),
        (COMPLETION, {"max_tokens": 4096}, "max_tokens", "lower max_tokens to 4095"),
        (COMPLETION, {"prompt": ["a"] * 257}, "prompt", "257 prompts: 256 are the most"),
        (COMPLETION, {"n": 2, "best_of": 3}, "best_of", "best_of is not supported"),
        (COMPLETION, {"model": "other"}, "model", "'other' is not here: this server has 'tiny'"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "tools is not supported by this server"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs to be true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21: it must be from 0 to 20"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "shorten it"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "it must be one of system"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "reads text",
        ),
    ],
)
def test_the_parameter_is_named(
    server: Served,  # noqa: F811
    path: str,
    more: dict[str, Any],
    parameter: str,
    words: str,
) -> None:
    error = server.post(path, {**GOOD[path], **more}).json()["error"]
    assert error["param"] == parameter
    assert words in error["message"]
