"""The engine: its greedy tokens are those of `transformers`, requests come, share steps and leave."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from echelon.models import hub
from echelon.models.parts import attend
from echelon.serve import attention, way
from echelon.serve.engine import Engine
from echelon.serve.quantize import quantize
from echelon.serve.request import BadRequest, EngineFailed, Piece, Refused, SamplingParams
from echelon.serve.runner import undisturbed
from echelon.serve.settings import Settings
from echelon.serve.slo import Pacer, Slo
from echelon.serve.stream import Stream
from tests.serve.models import SHAPES, small

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[7], [1, 2, 3], list(range(16)), list(range(40, 57)), list(range(100, 170))]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(small(), settings=Settings(cache_gib=0.02, token_budget=32, most_running=8, most_waiting=20))
    yield engine
    engine.close()


@pytest.mark.parametrize("reproducible", [False, True], ids=["fast", "reproducible"])
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_are_those_of_transformers(name: str, reproducible: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small(name)
    hub.save(model, tmp_path)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    settings = Settings(cache_gib=0.02, token_budget=24, most_running=3, reproducible=reproducible)
    engine = Engine(hub.load(tmp_path), settings=settings)
    answers = engine.generate(PROMPTS, GREEDY)
    engine.close()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([prompt])
        how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
        assert list(answer.choices[0].tokens) == expected[0, len(prompt) :].tolist()
        assert answer.choices[0].finish == "length"


def test_a_long_prompt_is_attended_to_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries at once as leave memory for their scores."""
    prompt, settings = list(range(100, 200)), Settings(cache_gib=0.02, token_budget=70)
    whole = Engine(small(), settings=settings)
    expected = whole.generate([prompt], GREEDY)
    whole.close()
    shapes = []
    over = attention._over_pages
    monkeypatch.setattr(attention, "_over_pages", lambda q, *rest: shapes.append(q.shape) or over(q, *rest))
    monkeypatch.setattr(attention, "_MOST_SCORES", 700)
    engine = Engine(small(), settings=settings)
    answers = engine.generate([prompt], GREEDY)
    engine.close()
    assert [each.choices for each in answers] == [each.choices for each in expected]
    assert max(shape[3] for shape in shapes) == 700 // 70


def test_what_is_told_of_an_engine() -> None:
    engine = Engine(quantize(small(dim=64, heads=4), "int8"), settings=Settings(cache_gib=0.001, most_running=8))
    engine.close()
    assert engine.how == (
        "cpu, float32 with int8 weights; PyTorch's own operations (on cpu); 64 pages of 16 tokens (0.5 MiB), 128 "
        "tokens of context; 8 requests and 512 tokens in a step"
    )
    with Engine(small(), settings=Settings(cache_gib=0.02, context=256, slo=Slo(5.0, 0.025))) as engine:
        assert "256 tokens of context (the model was made for 128);" in engine.how
        assert engine.how.endswith("promised: ttft=5s,tbt=25ms")


def test_what_promises_are_made_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much each step answers and reads, and when readers in an event loop heard of those that they waited for."""
    taken: list[tuple[int, int]] = []
    waits: list[float | None] = []
    took, heard = Pacer.took, Pacer.heard
    monkeypatch.setattr(Pacer, "took", lambda self, *step: (taken.append(step[:2]), took(self, *step)))
    monkeypatch.setattr(
        Pacer, "heard", lambda self, expected, now: (waits.append(expected), heard(self, expected, now))
    )

    async def read(engine: Engine) -> None:
        async for _ in engine.stream(list(range(20)), SamplingParams(max_tokens=30, ignore_eos=True)):
            pass

    with Engine(small(), settings=Settings(cache_gib=0.02, token_budget=16, slo=Slo(ttft=60))) as engine:
        asyncio.run(read(engine))
    assert taken == [(0, 16), (0, 4)] + [(1, 0)] * 29
    assert waits, "nobody was told that a reader has heard"
    assert None not in waits[1:], "only for the first token it has not waited since one before"


@pytest.mark.parametrize(("can", "why_not"), [((7, 5), "the GPU is older than Ampere"), ((8, 0), "")])
def test_kernels_are_for_gpus_on_which_they_fit(
    can: tuple[int, int], why_not: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way, "has_kernels", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: can)
    assert way.obstacle(torch.device("cuda"), Settings()) == why_not


def test_whoever_forgets_to_close_it_ends_quietly() -> None:
    script = """
from tests.serve.models import small
from echelon.serve.engine import Engine
from echelon.serve.request import SamplingParams
from echelon.serve.settings import Settings
engine = Engine(small(), settings=Settings(cache_gib=0.02))
stream = engine.open([1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
print(next(iter(stream)).tokens[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().isdigit()


def test_a_prompt_of_several_answers_is_counted_once() -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02))
    engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=2, n=3, ignore_eos=True))
    engine.close()
    told = engine.metrics.render("tiny")
    for name in ("prompt_tokens_total", "request_prompt_tokens_sum"):
        assert f'echelon:{name}{{model_name="tiny"}} 5' in told, name


def test_a_context_that_the_cache_has_no_room_for() -> None:
    with pytest.raises(ValueError, match=r"room for \d+ tokens, and --context asks for 128: give it more memory"):
        Engine(small(), settings=Settings(cache_gib=2e-5, context=128))


def test_several_engines_have_one_model_and_leave_it_as_it_was() -> None:
    model, tokens = small(), torch.tensor([[1, 2, 3]])
    before = model(tokens)
    kinds = [Settings(cache_gib=0.02, token_budget=16, reproducible=each) for each in (False, True, False)]
    engines = [Engine(model, settings=settings) for settings in kinds]
    streams = [engine.open(prompt, GREEDY) for prompt in PROMPTS for engine in engines]
    found = [[token for piece in stream for token in piece.tokens] for stream in streams]
    for engine in engines:
        engine.close()
    alone = Engine(small(), settings=kinds[0])
    answers = [list(answer.choices[0].tokens) for answer in alone.generate(PROMPTS, GREEDY)]
    alone.close()
    assert found == [answer for answer in answers for _ in engines]
    assert torch.equal(model(tokens), before)
    assert all(block.attention.attend is attend for block in model.blocks)
    assert "forward" not in vars(model.norm)


def test_text_in_text_out_and_the_end_of_it(engine: Engine) -> None:
    [answer] = engine.generate(["hello"], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    assert answer.prompt == tuple(b"hello")
    assert answer.text == engine.text.decode(answer.choices[0].tokens)
    end = answer.choices[0].tokens[10]
    first = answer.choices[0].tokens.index(end)
    engine.text.ends, before = frozenset({end}), engine.text.ends
    try:
        [ended] = engine.generate(["hello"], SamplingParams(max_tokens=24, temperature=0))
    finally:
        engine.text.ends = before
    assert ended.choices[0].tokens == answer.choices[0].tokens[: first + 1]
    assert ended.choices[0].finish == "stop"
    assert ended.text == engine.text.decode(answer.choices[0].tokens[:first])


def test_stop_texts_are_not_part_of_the_answer(engine: Engine) -> None:
    prompt = [*b"a stop text"]
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    [whole] = engine.generate([prompt], params)
    text = whole.text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    [cut] = engine.generate([prompt], dataclasses.replace(params, stop=("never there", stop)))
    assert cut.text == text[: text.index(stop)]
    assert cut.choices[0].finish == "stop"


def test_streams_and_whole_answers_are_the_same(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, seed=5, n=3, logprobs=2, ignore_eos=True)

    async def stream() -> list[Piece]:
        return [piece async for piece in engine.stream("a prompt of some length, cut in pages", params)]

    pieces = asyncio.run(stream())
    [answer] = engine.generate(["a prompt of some length, cut in pages"], params)
    assert len({choice.tokens for choice in answer.choices}) == 3
    for index, choice in enumerate(answer.choices):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == choice.text
        assert tuple(token for piece in mine for token in piece.tokens) == choice.tokens
        assert [piece.finish for piece in mine] == [None] * (len(mine) - 1) + ["length"]
        assert tuple(each.token for piece in mine for each in piece.logprobs) == choice.tokens
    assert answer.cached == 32


def test_logprobs_are_the_models(engine: Engine) -> None:
    [answer] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0, logprobs=3, ignore_eos=True))
    tokens = [1, 2, 3]
    model = small()
    for told in answer.choices[0].logprobs:
        expected = model(torch.tensor([tokens]))[0, -1].log_softmax(-1)
        assert told.logprob == pytest.approx(expected[told.token].item(), rel=1e-5)
        values, places = expected.topk(3)
        assert [token for token, _ in told.top] == places.tolist()
        assert [value for _, value in told.top] == pytest.approx(values.tolist(), rel=1e-5)
        tokens.append(told.token)


def test_what_is_cancelled_leaves_at_once(engine: Engine) -> None:
    async def leave_early() -> Piece:
        stream = engine.stream(list(range(30)), SamplingParams(max_tokens=90, ignore_eos=True, n=2))
        first = await anext(stream)
        await stream.aclose()
        return first

    assert asyncio.run(leave_early()).finish is None
    stream = engine.open([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    stream.cancel()
    stream.cancel()
    assert [piece.finish for piece in stream][-1] == "cancelled"
    engine.generate([[1]], GREEDY)
    assert engine.metrics.snapshot()["kv_usage"] == 0


def test_many_threads_ask_at_once(engine: Engine) -> None:
    alone = engine.generate(PROMPTS, GREEDY)
    found: dict[int, list[tuple[int, ...]]] = {}

    def ask(number: int) -> None:
        found[number] = [answer.choices[0].tokens for answer in engine.generate(PROMPTS, GREEDY)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number] == [answer.choices[0].tokens for answer in alone] for number in range(6))


def test_more_prompts_than_may_wait(engine: Engine) -> None:
    prompts = [[number, number] for number in range(60)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
    assert [answer.prompt for answer in answers] == [tuple(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompt", "changes", "parameter", "why"),
    [
        ("", {}, "prompt", "the prompt is empty"),
        ([], {}, "prompt", "the prompt is empty"),
        ([256], {}, "prompt", "numbers from 0 to 255"),
        ([-1], {}, "prompt", "numbers from 0 to 255"),
        ([1.5], {}, "prompt", "numbers from 0 to 255"),
        ("x" * 128, {}, "prompt", "the prompt has 128 tokens, but with its answer it may have 128"),
        ("\ud800", {}, "prompt", "halves of characters"),
        ("x", {"max_tokens": 128}, "max_tokens", "lower max_tokens to 127"),
    ],
)
def test_what_cannot_be_answered(engine: Engine, prompt: Any, changes: Any, parameter: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        engine.open(prompt, SamplingParams(**changes))
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"temperature": -1}, "temperature is -1: it must be from 0 to 100"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_p": 0}, "top_p is 0: it must be above 0 to 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1: it must be from 0"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_k": 2**63}, "top_k is 9223372036854775808: it must be from 0 to 2147483647"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"n": 0}, "n is 0: it must be from 1 to 128"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"seed": 2**63}, "seed is"),
        ({"stop": ("",)}, "none of them empty"),
        ({"stop": ("x",) * 17}, "16 are the most"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_absurd_parameters(changes: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        SamplingParams(**changes)


def test_a_full_queue_refuses_and_drains() -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02, most_running=1, most_waiting=2))
    streams = []

    def ask() -> None:
        for _ in range(40):
            streams.append(engine.open([1, 2], SamplingParams(max_tokens=100, ignore_eos=True)))

    with pytest.raises(Refused, match="2 requests are waiting already"):
        ask()
    for stream in streams[1:]:
        stream.cancel()
    engine.drain()
    assert [piece.finish for piece in streams[0]][-1] == "length"
    with pytest.raises(Refused, match="shut down"):
        engine.open([1], GREEDY)
    engine.close()


def test_a_failure_reaches_everyone() -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02))
    stream = engine.open([1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
    next(iter(stream))
    engine._runner.launch = lambda parts, draws: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="division by zero"):
        list(stream)
    with pytest.raises(EngineFailed, match="division by zero"):
        engine.open([1], GREEDY)
    assert isinstance(engine.failed, ZeroDivisionError)
    engine.close()


def test_a_closed_engine_says_so() -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02))
    stream = engine.open([1, 2], SamplingParams(max_tokens=120, ignore_eos=True))
    engine.close()
    with pytest.raises(EngineFailed, match="was closed"):
        list(stream)


def test_closing_wakes_those_who_wait_for_room() -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02, most_running=1, most_waiting=1))
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            engine.generate([[1, 2]] * 20, SamplingParams(max_tokens=100, ignore_eos=True))
        except (Refused, EngineFailed) as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not engine.metrics.snapshot()["waiting"]:
        time.sleep(0.01)
    engine.close()
    thread.join(20)
    assert not thread.is_alive()
    assert failures


def test_a_promise_that_was_broken_once_does_not_refuse_forever() -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02, slo=Slo(ttft=0.5, tbt=0.5)))
    engine.generate([[1, 2]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert engine._pacer is not None
    for _ in range(8):
        engine._pacer.took(1, 0, 1000.0)  # the machine had stopped
    assert not engine._pacer.can_promise(100, 1, 0)
    for _ in range(30):
        engine.generate([[1, 2]], SamplingParams(max_tokens=10, ignore_eos=True))
    assert engine._pacer.can_promise(100, 1, 0), "it has learned again"
    engine.close()


def test_waiting_for_requests_is_no_part_of_a_step() -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02, slo=Slo(ttft=0.5, tbt=0.5)))
    for _ in range(2):
        engine.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True))
        time.sleep(0.5)
    engine.close()
    assert engine._pacer is not None
    steps = [*engine._pacer._read, *engine._pacer._answered]
    assert len(steps) == 8
    assert all(seconds < 0.4 for *_, seconds in steps)


def test_a_step_takes_from_token_to_token(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Engine._take

    def slowly(self: Engine, *arguments: Any) -> None:
        take(self, *arguments)
        time.sleep(0.05)

    monkeypatch.setattr(Engine, "_take", slowly)
    engine = Engine(small(), settings=Settings(cache_gib=0.02, slo=Slo(tbt=1.0)))
    engine.generate([[1, 2]], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.close()
    assert engine._pacer is not None
    assert len(engine._pacer._answered) == 4
    assert all(seconds > 0.05 for *_, seconds in engine._pacer._answered), "those who answer wait for all of it"


def test_python_does_not_look_through_all_objects_while_steps_are_taken() -> None:
    old = weakref.ref(type("Old", (), {}))  # a class is a circle
    with undisturbed():
        assert old() is None, "what was garbage before is kept"
        engine = Engine(small(), settings=Settings(cache_gib=0.02))
        engine.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))
        engine.close()
        assert gc.get_freeze_count() > 10_000, "another goes on"


class Holder:
    """Becomes garbage in a circle, and then ends an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._me = engine, self

    def __del__(self) -> None:
        self._engine.close()


def test_an_engine_that_becomes_garbage_does_not_hold_up_the_next() -> None:
    answered = threading.Event()

    def one_after_the_other() -> None:
        engine = Engine(small(), settings=Settings(cache_gib=0.02))
        engine.generate([[1, 2]], SamplingParams(max_tokens=1))
        holder = Holder(engine)
        gc.collect()  # it has lived for a while
        del engine, holder
        with Engine(small(), settings=Settings(cache_gib=0.02)) as following:
            following.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))
        answered.set()

    threading.Thread(target=one_after_the_other, daemon=True).start()
    assert answered.wait(60)


def test_an_engine_that_failed_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> list[Any]:
        engine = Engine(small(), settings=Settings(cache_gib=0.02))
        monkeypatch.setattr(engine._runner, "launch", lambda *_: 1 / 0)
        with pytest.raises(EngineFailed):
            engine.generate([[1, 2]])
        engine.close()
        monkeypatch.undo()
        return [weakref.ref(engine), weakref.ref(engine._runner._way)]

    with Engine(small(), settings=Settings(cache_gib=0.02)):
        kept = failed()
        gc.collect()
        assert [each() for each in kept] == [None, None], "though another engine lives"


def test_whoever_ended_in_a_step_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02))
    monkeypatch.setattr(engine, "_report", lambda *_: 1 / 0)
    [piece] = read_in_time(engine)
    assert isinstance(piece, Piece)
    assert piece.finish == "length"
    engine.close()
    assert isinstance(engine.failed, ZeroDivisionError)


def test_whoever_ends_while_the_engine_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02))
    monkeypatch.setattr(engine.metrics, "finished", lambda *_: 1 / 0)
    [told] = read_in_time(engine)
    assert isinstance(told, EngineFailed)
    engine.close()


def test_whoever_was_cancelled_beside_one_whose_end_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small(), settings=Settings(cache_gib=0.02))
    monkeypatch.setattr(engine.metrics, "finished", Mock(side_effect=[None, ZeroDivisionError]))
    told: queue.Queue[Any] = queue.Queue()

    def read(stream: Stream) -> None:
        try:
            told.put([piece.finish for piece in stream][-1])
        except EngineFailed as error:
            told.put(type(error))

    with engine._changed:  # both are cancelled between two steps
        for _ in range(2):
            stream = engine.open([1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
            stream.is_cancelled = True
            threading.Thread(target=read, args=(stream,), daemon=True).start()
    assert {told.get(timeout=30), told.get(timeout=30)} == {"cancelled", EngineFailed}
    engine.close()


def read_in_time(engine: Engine) -> list[Piece | EngineFailed]:
    """What comes of a request of one token."""
    stream = engine.open([1, 2], SamplingParams(max_tokens=1, ignore_eos=True))
    told: list[Piece | EngineFailed] = []

    def read() -> None:
        try:
            told.extend(stream)
        except EngineFailed as failure:
            told.append(failure)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(20)
    assert told, "it waits for ever"
    return told


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="context=200, but the model has learned positions for 128"):
        Engine(small("gpt2"), settings=Settings(cache_gib=0.02, context=200))
    with pytest.raises(ValueError, match="page_size=12 does not divide 128"):
        Settings(page_size=12)
    with pytest.raises(ValueError, match="most_waiting=0: at least 1"):
        Settings(most_waiting=0)
    with pytest.raises(ValueError, match="token_budget=-1: it cannot be negative"):
        Settings(token_budget=-1)
    with pytest.raises(ValueError, match="give it more memory"):
        Engine(small(), settings=Settings(cache_gib=1e-6))
