"""`echelon bench serve`: what is measured is what arrived, in a time that is known exactly; then the whole command."""

from __future__ import annotations

import asyncio
import json
import math
import socket

import pytest
from typer.testing import CliRunner

from echelon import cli
from echelon.bench.serve import ask, drive
from echelon.bench.serve_client import Client, Events, Failed
from echelon.bench.serve_load import Request
from echelon.bench.serve_options import ServeOptions, parse_goodput, parse_percentiles
from echelon.bench.serve_target import Server
from tests.bench.serving import FakeServer, beside, completion, delta, run, usage

ASKED = Request((5, 6, 7), 3, 3)
STEADY = [(0.5, completion("a")), (0.25, completion("b")), (0.75, completion("c")), (0.125, usage(3, 3))]


def asked(fake: FakeServer, *requests: Request, backend="openai", times=(), most=None):
    """The outcomes, in a time that jumps."""

    async def main(clock):
        async with await fake.start():
            server = Server(Client(fake.url, {}), backend, "", "tiny", {"temperature": 0.0}, clock)
            outcomes, seconds = await drive(server, requests, times or [0.0] * len(requests), most, clock)
            await server.close()
        return outcomes, seconds

    return run(main)


def test_times_are_those_of_arrival():
    fake = FakeServer(lambda body: STEADY)
    [outcome], seconds = asked(fake, ASKED)
    assert not outcome.error
    assert (outcome.ttft, outcome.gaps, outcome.latency) == (0.5, [0.25, 0.75], 1.5)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.text) == (3, 3, "abc")
    assert outcome.tpot == 0.5
    assert seconds == 1.625  # until the server has said all, while the latency is that of the last token
    assert fake.paths == ["/v1/completions"]
    [body] = fake.bodies
    assert body == {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }


def test_requests_are_sent_when_their_time_has_come():
    fake = FakeServer(lambda body: STEADY)
    outcomes, seconds = asked(fake, ASKED, ASKED, ASKED, times=[0.25, 1.0, 4.0])
    assert [outcome.start for outcome in outcomes] == [0.25, 1.0, 4.0]
    assert [outcome.latency for outcome in outcomes] == [1.5] * 3
    assert seconds == 5.625
    assert fake.connections == 2  # the third found one of the first two free


def test_who_waits_here_is_not_measured_there():
    outcomes, seconds = asked(FakeServer(lambda body: STEADY), ASKED, ASKED, ASKED, most=1)
    assert [outcome.start for outcome in outcomes] == [0.0, 1.625, 3.25]
    assert [outcome.queued for outcome in outcomes] == [0.0, 1.625, 3.25]
    assert [outcome.latency for outcome in outcomes] == [1.5] * 3
    assert seconds == 4.875


def test_chat():
    """The role comes before any token, and a delta without content is none."""
    plan = [
        (0.125, delta(role="assistant", content="")),
        (0.375, delta(content="a")),
        (0.25, delta(content="")),
        (0.5, delta(reasoning_content="b")),
        (0.25, delta()),
        (0.0, usage(9, 3)),
    ]
    fake = FakeServer(lambda body: plan)
    [outcome], _ = asked(fake, Request("hello", 3), backend="openai-chat")
    assert (outcome.ttft, outcome.gaps, outcome.latency) == (0.5, [0.25, 0.5], 1.25)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.text) == (9, 3, "ab")
    assert fake.paths == ["/v1/chat/completions"]
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert fake.bodies[0]["max_completion_tokens"] == 3


def test_events_that_share_or_cross_packets():
    first, second = (b"data: %s\n\n" % json.dumps(completion(text)).encode() for text in "ab")
    plan = [(0.5, first + second[:9]), (0.5, second[9:]), (0.5, b": still here\n\n"), (0.5, first + second)]
    [outcome], _ = asked(FakeServer(lambda body: plan), ASKED)
    assert (outcome.ttft, outcome.gaps) == (0.5, [0.5, 1.0, 0.0])
    assert (outcome.output_tokens, outcome.text) == (4, "abab")  # without usage, arrivals are counted


def test_events_cut_anywhere():
    text = 'data: {"é": 1}\r\n\r\nevent: more\ndata:two\ndata: lines\n\n: nothing\n\ndata: [DONE]\n\n'.encode()
    for cut in range(len(text)):
        events = Events()
        assert events.feed(text[:cut]) + events.feed(text[cut:]) == ['{"é": 1}', "two\nlines", "[DONE]"]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([(0.0, 503)], "HTTP 503: no"),
        ([(0.0, None)], "the server ended the connection without an answer"),
        ([(0.0, completion("a")), (0.5, None)], "the server ended the connection in the middle of its answer"),
        ([(0.0, completion("a")), (0.5, {"error": {"message": "out of memory"}})], "out of memory"),
        ([(0.0, usage(3, 0))], "the answer ended without a token"),
        ([(0.0, b"data: {\n\n")], "JSONDecodeError: "),
    ],
)
def test_failures_are_outcomes(plan, words):
    outcomes, _ = asked(FakeServer(lambda body: plan if body["max_tokens"] == 1 else STEADY), ASKED, Request((5,), 1))
    assert outcomes[0].error == ""
    assert outcomes[1].error.startswith(words)


def test_a_connection_that_ended_meanwhile_is_replaced():
    fake = FakeServer(lambda body: STEADY, keep=False)
    outcomes, _ = asked(fake, ASKED, ASKED, ASKED, most=1)
    assert [outcome.error for outcome in outcomes] == [""] * 3
    assert fake.connections == 3


def test_an_answer_without_length_ends_with_the_connection():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\ndata: " + json.dumps(completion("a")).encode() + b"\n\n")
        writer.close()

    async def main(clock):
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await ask(Server(Client(url, {}), "openai", "", "tiny", {}, clock), ASKED, clock)

    assert run(main).text == "a"


def test_which_model():
    async def main(_clock):
        async with await FakeServer(lambda body: STEADY, ("first", "second")).start() as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            client = Client(url, {})
            assert await Server.find_model(client, "") == "first"
            assert await Server.find_model(client, "second") == "second"
            with pytest.raises(Failed, match="has no model 'third': it has first, second"):
                await Server.find_model(client, "third")
            await client.close()

    run(main)


def invoke(*arguments, environment=None):
    return CliRunner(env={"COLUMNS": "400"} | (environment or {})).invoke(
        cli.app, ["bench", "serve", *map(str, arguments)]
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_the_command(tmp_path):
    data = tmp_path / "result.json"
    with beside(FakeServer(lambda body: [(0.0, part) for _, part in STEADY])) as fake:
        load = ["--num-prompts", 5, "--random-input-len", 4, "--random-output-len", 3, "--num-warmups", 2]
        load += ["--request-rate", 1000, "--max-concurrency", 2, "--ignore-eos", "--temperature", 0]
        told = ["--metric-percentiles", "50,99", "--percentile-metrics", "ttft,itl", "--json", data]
        told += ["--save-result", "--result-dir", tmp_path / "all", "--save-detailed"]
        told += ["--goodput", "ttft:60000", "e2el:60000"]
        job = invoke("--base-url", fake.url + "/v1/", *load, *told, environment={"OPENAI_API_KEY": "secret"})
    assert job.exit_code == 0, job.output
    assert "Successful requests:                     5 " in job.stdout
    assert "P50 ITL (ms):" in job.stdout
    assert "E2EL" not in job.stdout
    assert job.stderr == ""
    assert len(fake.bodies) == 1 + 2 + 5
    assert fake.bodies[0] == fake.bodies[1] == fake.bodies[2]
    assert len({str(body["prompt"]) for body in fake.bodies}) == 6
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in fake.bodies)
    assert all(headers["authorization"] == "Bearer secret" for headers in fake.headers)
    result = json.loads(data.read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (5, 0, 15)
    assert (result["model_id"], result["request_rate"], result["max_concurrency"]) == ("tiny", 1000.0, 2)
    assert result["request_goodput"] == result["request_throughput"]
    assert result["generated_texts"] == ["abc"] * 5
    assert "secret" not in data.read_text()
    [named] = (tmp_path / "all").iterdir()
    assert named.name.startswith("openai-1000.0qps-concurrency2-tiny-")
    assert json.loads(named.read_text()) == result


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_an_engine_in_process(backend, tmp_path):
    data = tmp_path / "result.json"
    load = ["--num-prompts", 6, "--input-len", 8, "--output-len", 5, "--ignore-eos", "--request-rate", 100]
    job = invoke("--random", "llama-tiny", "--backend", backend, *load, "--json", data, "--save-detailed")
    assert job.exit_code == 0, job.output
    told = json.loads(data.read_text())
    assert (told["backend"], told["model_id"], told["completed"]) == ("in-process", "llama-tiny", 6)
    assert told["output_lens"] == [5] * 6
    assert all(len(gaps) <= 4 for gaps in told["itls"])  # fewer where several tokens came at once
    if backend == "openai":
        assert told["input_lens"] == [8] * 6
    else:
        assert min(told["input_lens"]) > 8  # with the words around it


def test_failed_requests_are_counted_and_some_told():
    def plan(body):
        return [(0.0, 500)] if len(fake.bodies) in (3, 4) else [(0.0, completion("a"))]

    with beside(FakeServer(plan)) as fake:
        job = invoke("--base-url", fake.url, "--num-prompts", 6, "--input-len", 2)
    assert job.exit_code == 0, job.output
    assert "Successful requests:                     4 " in job.stdout
    assert "Failed requests:                         2 " in job.stdout
    assert job.stderr == "echelon: a request failed: HTTP 500: no\n"


def test_no_server_is_an_error_before_anything_starts():
    port = free_port()
    job = invoke("--port", port)
    assert job.exit_code == 1
    assert f"no connection to http://127.0.0.1:{port}: " in job.stderr
    assert job.stdout == ""


def test_a_server_that_refuses_is_an_error_too():
    with beside(FakeServer(lambda body: [(0.0, 400)])) as fake:
        job = invoke("--base-url", fake.url, "--num-prompts", 100)
    assert job.exit_code == 1
    assert job.stderr == "echelon: a first request was not answered: HTTP 400: no\n"
    assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "tgi"], "--backend tgi: it is one of openai, openai-chat"),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt: it is one of random, custom"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics speed: it is one of ttft, tpot, itl, e2el"),
        (["--num-prompts", 0], "--num-prompts 0: it is 1 or more"),
        (["--max-concurrency", 0], "--max-concurrency 0: it is 1 or more"),
        (["--random-range-ratio", 1], "--random-range-ratio 1: it is from 0 to less than 1"),
        (["--request-rate", 0], "--request-rate 0: it is above 0; inf sends all at once"),
        (["--burstiness", 0], "--burstiness 0: it is above 0"),
        (["--dataset-name", "custom"], "--dataset-name custom and --dataset-path FILE belong together"),
        (["--dataset-path", "x.jsonl"], "--dataset-name custom and --dataset-path FILE belong together"),
        (["--goodput", "speed:5"], "--goodput speed:5: write NAME:MILLISECONDS, with one of ttft, tpot, e2el"),
        (["--goodput", "ttft:5", "tpot"], "--goodput tpot: '' is no number from 0 up"),
        (["ttft:5"], "'ttft:5' belongs to no option"),
        (["--metric-percentiles", "99,101"], "--metric-percentiles 99,101: they are from 0 to 100"),
        (["--result-dir", "results"], "--save-detailed, --result-dir and --result-filename need --save-result"),
        (["--base-url", "ftp://host"], "'ftp://host' is no address of a server: write http://host:port"),
        (["--tokenizer", "nowhere"], "there is no tokenizer nowhere"),
        (["--random", "llama-tony"], "no model is named 'llama-tony' (did you mean 'llama-tiny'?)"),
        (["--in-process", "nowhere"], "nowhere is not there: name a Hugging Face folder"),
        (["--in-process", "x", "--base-url", "http://y"], "each say who is asked: give one of them"),
    ],
)
def test_refused(arguments, words):
    job = invoke(*arguments)
    assert job.exit_code == 2, job.output
    assert job.stderr.startswith("echelon: ")
    assert words in job.stderr


def test_parsing():
    assert parse_goodput(["ttft:5000", "tpot:25"]) == {"ttft": 5000.0, "tpot": 25.0}
    assert parse_percentiles("50,99.9") == (50.0, 99.9)


def test_addresses():
    assert ServeOptions(port=81).url == "http://127.0.0.1:81"
    assert ServeOptions(base_url="https://there/api/v1/").url == "https://there/api"
    assert ServeOptions().request_rate == math.inf


def test_it_is_a_command_of_its_own_beside_bench():
    shown = CliRunner().invoke(cli.app, ["bench", "serve", "--help"])
    assert shown.exit_code == 0
    assert "--request-rate" in shown.stdout
    assert "serve" in {line.split()[0] for line in CliRunner().invoke(cli.app, ["bench"]).stdout.splitlines() if line}
