"""The server, asked by OpenAI's own client and by plain HTTP; behind it is an engine with a tiny model."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from echelon.serve.request import Refused
from echelon.serve.server import CannotListen, listen
from tests.serve.served import MODEL, Served, served, server, tiny_engine, until  # noqa: F401 (a fixture)

LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}  # takes many seconds
ANY = {"ignore_eos": True}  # random weights may end an answer anywhere


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:  # noqa: F811
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=8, seed=1, extra_body=ANY)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 40, "seed": 2, "extra_body": ANY}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 1
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_tells_its_usage_when_asked(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    asked: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4, "stream_options": options, "extra_body": ANY}
    *chunks, last = client.completions.create(model=MODEL, stream=True, **asked)
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.total_tokens) == ([], 9)


def test_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "seed": 3, "extra_body": ANY}
    whole = client.chat.completions.create(**asked, max_completion_tokens=20)
    assert whole.object == "chat.completion"
    [choice] = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("system: Be brief.\nuser: Hello\nassistant:")
    first, *chunks = client.chat.completions.create(**asked, max_tokens=20, stream=True)
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_goes_on_as_long_as_the_context_unless_told(server: Served) -> None:  # noqa: F811
    stops = list("abcdefghijklmnop")  # one of which comes soon
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stop": stops, **ANY})
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_events_are_as_the_protocol_wants_them(server: Served) -> None:  # noqa: F811
    asked = {"prompt": "Hello", "max_tokens": 3, "stream": True, **ANY}
    answer = server.post("/v1/completions", asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


def test_several_prompts_and_answers_are_numbered_through(client: openai.OpenAI) -> None:
    prompts = ["Hello", "Hello", "World!"]
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 6, "seed": 4, "extra_body": ANY}
    whole = client.completions.create(**asked)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert texts[0] == texts[2] != texts[1] == texts[3]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (16, 36)
    parts = [""] * 6
    for chunk in client.completions.create(**asked, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == texts


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [72, 105], [[72, 105]]], ids=str)
def test_a_prompt_may_be_text_or_tokens(client: openai.OpenAI, prompt: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "seed": 5, "extra_body": ANY}
    whole = client.completions.create(prompt=prompt, echo=True, **asked)
    assert whole.choices[0].text == "Hi" + client.completions.create(prompt="Hi", **asked).choices[0].text
    chunks = client.completions.create(prompt=prompt, echo=True, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_the_likeliest_tokens_of_a_completion(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 5, "temperature": 0, "logprobs": 3}
    told = client.completions.create(**asked, extra_body=ANY).choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert len(told.tokens) == len(told.token_logprobs or ()) == len(told.top_logprobs or ()) == 5
    for token, own, top in zip(told.tokens, told.token_logprobs or (), told.top_logprobs or (), strict=True):
        assert top[token] == own == max(top.values())
    chunks = client.completions.create(**asked, stream=True, extra_body=ANY)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in parts if part for token in part.tokens or ()] == told.tokens
    assert [at for part in parts if part for at in part.text_offset or ()] == told.text_offset


def test_the_likeliest_tokens_of_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 5, "temperature": 0, "logprobs": True}
    told = client.chat.completions.create(model=MODEL, **asked, top_logprobs=2, extra_body=ANY).choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [len(each.top_logprobs) for each in told.content] == [2] * 5
    assert all(each.logprob == each.top_logprobs[0].logprob for each in told.content)
    assert all(each.bytes is None or bytes(each.bytes).decode() == each.token for each in told.content)
    without = client.chat.completions.create(model=MODEL, **asked, extra_body=ANY).choices[0].logprobs
    assert without is not None
    assert [each.top_logprobs for each in without.content or ()] == [[]] * 5


def test_what_asks_for_nothing_is_taken(server: Served) -> None:  # noqa: F811
    harmless = {
        "user": "me", "logit_bias": {}, "best_of": 1, "suffix": None, "metadata": {"a": "b"}, "store": False,
        "top_p": None, "stop": [], "min_p": 0.1, "top_k": 5, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "priority": 3, "service_tier": "auto", "stream_options": None,
    }  # fmt: skip
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **harmless}).status_code == 200
    harmless = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    said = {"messages": [{"role": "user", "content": "a", "name": "me"}], "max_tokens": 1}
    assert server.post("/v1/chat/completions", {**said, **harmless}).status_code == 200


def test_the_model_is_told(client: openai.OpenAI, server: Served) -> None:  # noqa: F811
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == server.engine.context
    with pytest.raises(openai.NotFoundError, match="is not here"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match="'other' is not here: this server has 'tiny'"):
        client.completions.create(model="other", prompt="a")


def test_health_and_metrics(server: Served) -> None:  # noqa: F811
    assert server.plain.get("/health").json() == {"status": "ok"}
    assert server.plain.head("/health").status_code == 200
    answer = server.plain.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'echelon:num_requests_running{model_name="tiny"}' in answer.text
    assert server.plain.get("/live").json()["model"] == MODEL


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/docs", 404), ("DELETE", "/", 405)],
)
def test_a_path_that_is_not_there(server: Served, method: str, path: str, status: int) -> None:  # noqa: F811
    answer = server.plain.request(method, path)
    assert answer.status_code == status
    assert f"there is no {method} {path}" in answer.json()["error"]["message"]


def is_idle(server: Served) -> bool:  # noqa: F811
    live = server.live()
    return live["running"] == live["waiting"] == 0 and live["kv_usage"] == 0


def test_a_stream_ends_when_its_client_leaves(client: openai.OpenAI, server: Served) -> None:  # noqa: F811
    before = server.live()["finished"]["abort"]
    with client.completions.create(model=MODEL, stream=True, prompt="a", max_tokens=4000, extra_body=ANY) as stream:
        next(iter(stream))
        until(lambda: server.live()["running"] == 1)
    until(lambda: server.live()["finished"]["abort"] == before + 1)
    until(lambda: is_idle(server))


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}, {"stream": True, "prompt": ["a", "b"]}])
def test_an_answer_is_not_finished_for_a_client_who_left(server: Served, more: dict[str, Any]) -> None:  # noqa: F811
    before = server.live()["finished"]["abort"]
    answers = more.get("n", 1) * len(more.get("prompt", "a"))
    asked = json.dumps({"model": MODEL, **LONG, **more}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(asked)}\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plain:
        plain.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + asked)
        until(lambda: server.live()["running"] == answers)
    until(lambda: server.live()["finished"]["abort"] == before + answers)
    until(lambda: is_idle(server))


def test_a_client_may_leave_while_it_asks(server: Served) -> None:  # noqa: F811
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\nContent-Type: application/json\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plain:
        plain.sendall(head + b'\r\n{"model"')
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_many_clients_at_once(server: Served) -> None:  # noqa: F811
    def ask(seed: int) -> str:
        asked = {"prompt": "Hello", "max_tokens": 8, "seed": seed % 2, **ANY}
        return str(server.post("/v1/completions", asked).json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(24)))
    assert len(set(texts)) == 2


def test_the_key_is_asked_for() -> None:
    with served(tiny_engine(), api_key="secret") as guarded:
        plain = guarded.plain
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        for key in (None, "wrong", "secret2", "sécret"):
            headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
            for path in ("/v1/models", "/live", "/v1/nowhere"):
                answer = plain.get(path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), (key, path)
                assert "secret" not in answer.text
            assert plain.post("/v1/completions", json=body, headers=headers).status_code == 401
        for path in ("/health", "/metrics", "/"):
            assert plain.get(path).status_code == 200
        right = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="secret", max_retries=0)
        assert right.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
        assert plain.get("/live", headers={"Authorization": "bearer secret"}).status_code == 200


def test_another_sites_page_cannot_ask() -> None:
    with served(tiny_engine(), names=("localhost", "127.0.0.1")) as local:
        plain = local.plain
        assert plain.get("/live", headers={"Host": "evil.example"}).status_code == 403  # a name that points here
        assert plain.get("/live", headers={"Host": "LOCALHOST:8000"}).status_code == 200
        headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}  # what a page may send unasked
        assert plain.post("/v1/completions", content="{}", headers=headers).status_code == 415
        asked = plain.options("/v1/completions", headers={**headers, "Access-Control-Request-Method": "POST"})
        assert asked.status_code == 405
        assert not [name for name in asked.headers if name.startswith("access-control")]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_may_not_be_too_large(is_chunked: bool) -> None:
    with served(tiny_engine(), max_body=100_000) as small:
        body = b"x" * 300_000
        content = iter([body[:150_000], body[150_000:]]) if is_chunked else body
        answer = small.plain.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert small.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_too_much_to_do_is_told_with_when_to_ask_again() -> None:
    with served(tiny_engine(most_running=1, most_waiting=2)) as busy, ThreadPoolExecutor(2) as pool:
        live = [pool.submit(busy.post, "/v1/completions", {**LONG, "n": 1}) for _ in range(2)]
        until(lambda: (busy.live()["running"], busy.live()["waiting"]) == (1, 1))
        answer = busy.post("/v1/completions", {**LONG, "prompt": ["a", "b"]})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert "waiting already" in answer.json()["error"]["message"]
        until(lambda: busy.live()["waiting"] == 1)  # neither of the two was kept
        error = openai.OpenAI(base_url=f"{busy.url}/v1", api_key="-", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            error.completions.create(model=MODEL, prompt=["a", "b"])
        never = busy.post("/v1/completions", {**LONG, "prompt": ["a", "b", "c"]})
        assert never.status_code == 400
        assert "no more than 2 may wait here" in never.json()["error"]["message"]
        drain(busy, 0)
        assert [each.result().status_code for each in live] == [503, 503]


def drain(server: Served, seconds: float) -> int:  # noqa: F811
    return asyncio.run_coroutine_threadsafe(server.jobs.drain(seconds), server.loop).result()


def test_a_server_that_ends_finishes_what_it_has() -> None:
    with served(tiny_engine()) as ending, ThreadPoolExecutor(2) as pool:
        live = pool.submit(ending.post, "/v1/completions", {**LONG, "max_tokens": 300})
        until(lambda: ending.live()["running"] == 1)
        drained = pool.submit(drain, ending, 30)
        until(lambda: ending.jobs.closing)
        for answer in (ending.post("/v1/completions", LONG), ending.plain.get("/health")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_ending")
        assert drained.result() == 0
        assert live.result().json()["usage"]["completion_tokens"] == 300


def test_what_is_not_finished_in_time_is_cut_off() -> None:
    with served(tiny_engine()) as ending, ThreadPoolExecutor(1) as pool:
        live = pool.submit(ending.post, "/v1/completions", LONG)
        with openai.OpenAI(base_url=f"{ending.url}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(model=MODEL, stream=True, prompt="a", max_tokens=4000, extra_body=ANY)
            next(iter(stream))
            until(lambda: ending.live()["running"] == 2)
            assert drain(ending, 0) == 2
            with pytest.raises(openai.APIError, match="the server is ending"):
                list(stream)
        assert live.result().status_code == 503


def test_an_engine_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny_engine()) as failing, ThreadPoolExecutor(1) as pool:
        live = pool.submit(failing.post, "/v1/completions", LONG)
        with openai.OpenAI(base_url=f"{failing.url}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(model=MODEL, stream=True, prompt="a", max_tokens=4000, extra_body=ANY)
            next(iter(stream))
            until(lambda: failing.live()["running"] == 2)
            monkeypatch.setattr(failing.engine._runner, "launch", lambda parts, draws: 1 / 0)
            with pytest.raises(openai.APIError, match="the engine has failed: the server"):
                list(stream)
        for answer in (live.result(), failing.post("/v1/completions", LONG), failing.plain.get("/health")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("a secret path"), 500), (Refused("too much", 2.5), 429)])
def test_no_details_of_what_nobody_foresaw(monkeypatch: pytest.MonkeyPatch, error: Exception, status: int) -> None:
    def fail(*_: Any) -> None:
        raise error

    with served(tiny_engine()) as broken:
        monkeypatch.setattr(broken.engine, "open", fail)
        answer = broken.post("/v1/completions", LONG)
        assert answer.status_code == status
        assert "secret" not in answer.text
        assert answer.headers.get("retry-after") == ("3" if status == 429 else None)


SERVER = """
import json, sys
from echelon.serve.server import listen, serve
from tests.serve.served import tiny_engine

for line in sys.stdin:
    limit, fails = json.loads(line)
    engine = tiny_engine()
    if fails:
        engine._runner.launch = lambda parts, draws: 1 / 0
    code = serve(engine, listen(port=0), drain_seconds=limit)
    engine.close()
    print("ended with", code, flush=True)
"""


class Process:
    """A process that serves as often as it is told to: to import torch each time would take the tests long."""

    def __init__(self, started: subprocess.Popen[str]) -> None:
        self._started = started
        self.plain = httpx2.Client(timeout=60)

    def serve(self, limit: float, fails: bool = False) -> None:
        assert self._started.stdin is not None
        print(json.dumps([limit, fails]), file=self._started.stdin, flush=True)
        *_, line = self.said_until("serving tiny at http://127.0.0.1:")
        self.url = line.split()[3]

    def said_until(self, words: str) -> list[str]:
        assert self._started.stdout is not None
        lines = []
        for line in self._started.stdout:
            lines.append(line.strip())
            if line.startswith(words):
                return lines
        raise AssertionError(f"the process has ended: {lines}")

    def ask(self, tokens: int) -> httpx2.Response:
        return self.plain.post(f"{self.url}/v1/completions", json={"model": MODEL, **LONG, "max_tokens": tokens})

    def is_running(self) -> bool:
        return bool(self.plain.get(f"{self.url}/live").json()["running"] == 1)

    def is_ending(self) -> bool:
        return self.plain.get(f"{self.url}/health").status_code == 503

    def signal(self, number: signal.Signals) -> None:
        self._started.send_signal(number)


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as started:
        made = Process(started)
        try:
            with made.plain:
                yield made
        finally:
            started.kill()


def test_a_request_that_never_comes_whole_is_left_quietly(process: Process) -> None:
    process.serve(limit=60)
    host, port = process.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            "Content-Length: 9",
        )
        half.sendall("\r\n".join((*lines, "", "{")).encode())
        until(lambda: process.plain.get(f"{process.url}/health").status_code == 200)
        process.signal(signal.SIGTERM)
        said = process.said_until("ended with")
    assert said[-1] == "ended with 0"
    assert not [line for line in said if "Traceback" in line], said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_lets_the_live_ones_end(process: Process, number: signal.Signals) -> None:
    process.serve(limit=60)
    with ThreadPoolExecutor(1) as pool:
        live = pool.submit(process.ask, 300)
        until(process.is_running)
        process.signal(number)
        until(process.is_ending)
        assert live.result().json()["usage"]["completion_tokens"] == 300
    first, *_, last = process.said_until("ended with")
    assert first.startswith(f"echelon: {number.name}: taking no more requests")
    assert last == "ended with 0"


@pytest.mark.parametrize("limit", [60, 0.1])
def test_a_second_signal_or_the_limit_cuts_them_off(process: Process, limit: float) -> None:
    process.serve(limit)
    with ThreadPoolExecutor(1) as pool:
        live = pool.submit(process.ask, 4000)
        until(process.is_running)
        process.signal(signal.SIGTERM)
        if limit == 60:
            until(process.is_ending)
            process.signal(signal.SIGTERM)
        assert live.result().status_code == 503
    _, cut, last = process.said_until("ended with")
    assert (cut, last) == ("echelon: requests that were cut off: 1", "ended with 0")


def test_a_server_ends_with_its_engine(process: Process) -> None:
    process.serve(limit=60, fails=True)
    assert process.ask(10).status_code == 503
    *said, last = process.said_until("ended with")
    assert any("ZeroDivisionError" in line for line in said)
    assert "echelon: the engine failed, so the server ends: division by zero" in said
    assert last == "ended with 1"


def test_an_address_that_is_not_to_be_had() -> None:
    with listen(port=0) as taken, pytest.raises(CannotListen, match="Address already in use; choose another"):
        listen(port=taken.getsockname()[1])
    for host, port in (("127.0.0.1", 70000), ("no.such.host.invalid", 0), ("192.0.2.1", 0)):
        with pytest.raises(CannotListen, match=f"cannot listen on {host}, port {port}"):
            listen(host, port)


def test_each_token_is_sent_at_once() -> None:
    with listen(port=0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # or asyncio lets the kernel gather small packets for 40 ms
