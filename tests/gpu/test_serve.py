"""Serving on a GPU: the tokens are those of the CPU, with everything in the mixture, and nothing is left behind."""

from __future__ import annotations

import random
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon.parallel import shards
from echelon.serve import memory, way
from echelon.serve.engine import Engine
from echelon.serve.graphs import Captures, Graph
from echelon.serve.narrow import NarrowWeight
from echelon.serve.pieces import Pieces
from echelon.serve.quantize import quantize
from echelon.serve.request import SamplingParams
from echelon.serve.runner import Runner
from echelon.serve.settings import Settings
from tests.serve.models import SHAPES, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PROMPTS = [[7], list(range(16)), list(range(40, 57)), list(range(100, 170))]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
FEW = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LIMITS: dict[str, Any] = {"cache_gib": 0.02, "token_budget": 24, "most_running": 3}


def tokens(model: Any, params: SamplingParams, **settings: Any) -> list[tuple[int, ...]]:
    engine = Engine(model, settings=Settings(**LIMITS | settings))
    answers = engine.generate(PROMPTS, params)
    engine.close()
    return [choice.tokens for answer in answers for choice in answer.choices]


@pytest.mark.parametrize("off", ["", "ahead", "graphs", "fused"])
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_are_those_of_the_cpu(name: str, off: str) -> None:
    model = small(name).cuda()
    settings = {off: False} if off else {}
    assert way.choose(model, Settings(**settings)).fused == (off != "fused")
    assert tokens(model, GREEDY, **settings) == tokens(small(name), GREEDY)


def test_a_long_prompt_alone_is_read_in_many_steps_that_draw_nothing() -> None:
    answers = []
    for model in (small().cuda(), small()):
        engine = Engine(model, settings=Settings(cache_gib=0.02, token_budget=2, most_running=2))
        answers.append(engine.generate([list(range(100, 220))], FEW))
        engine.close()
    assert answers[0][0].choices == answers[1][0].choices


def test_a_long_sequence_among_short_ones_is_read_in_pieces() -> None:
    prompts = [[7], [number % 250 for number in range(3000)], list(range(90)), list(range(200))]
    settings = Settings(cache_gib=0.1, token_budget=4096, most_running=4)
    pieces = Pieces.of
    joined = []
    with patch.object(Pieces, "of", lambda *each: (found := pieces(*each), joined.append(len(found[1])))[0]):
        answers = []
        for model in (small(context=4096).cuda(), small(context=4096)):
            engine = Engine(model, settings=settings)
            answers.append([answer.choices[0].tokens for answer in engine.generate(prompts, GREEDY)])
            engine.close()
    assert answers[0] == answers[1]
    assert any(joined), "keys were not read in pieces, so that was not tried"


def test_chance_is_that_of_the_cpu() -> None:
    params = SamplingParams(max_tokens=16, seed=5, n=2, top_k=40, min_p=0.01, repetition_penalty=1.2, ignore_eos=True)
    assert tokens(small().cuda(), params) == tokens(small(), params)
    plain = SamplingParams(max_tokens=16, seed=5, n=2, ignore_eos=True)
    assert tokens(small().cuda(), plain) == tokens(small(), plain)


@pytest.mark.parametrize("reproducible", [False, True], ids=["fast", "reproducible"])
def test_bf16_is_served(reproducible: bool) -> None:
    found = tokens(small().bfloat16().cuda(), GREEDY, reproducible=reproducible)
    assert [len(each) for each in found] == [24] * len(PROMPTS)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "near"), [("int8", 0.1), ("fp8", 0.3)])
def test_weights_in_8_bits(kind: str, near: float) -> None:
    """Of the same weights in fp32 on the CPU come about the same chances."""
    shape = {"dim": 64, "heads": 4, "kv_heads": 2, "mlp_dim": 96}
    model, reference = quantize(small(**shape).bfloat16().cuda(), kind), small(**shape)
    for given, wide in zip(model.parameters(), reference.parameters(), strict=True):
        is_narrow = isinstance(given, NarrowWeight)
        wide.copy_(given.data8_NK.float() * given.scale_N1 if is_narrow else given)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=1)
    told = []
    for each in (model, reference):
        assert way.choose(each, Settings()).fused == (each is model)
        engine = Engine(each, settings=Settings(cache_gib=0.02, token_budget=256, most_running=8))
        told.append([answer.choices[0].logprobs[0].logprob for answer in engine.generate(PROMPTS, params)])
        engine.close()
    assert told[0] == pytest.approx(told[1], abs=near)


def test_two_thousand_requests() -> None:
    """Arrivals, cancellations and pre-emptions at random: what is answered is what the CPU answers, no page is lost."""
    chance = random.Random(0)
    requests = [
        (
            [chance.randrange(256) for _ in range(chance.choice([1, 12, 40, 70]))],
            SamplingParams(max_tokens=chance.randint(1, 24), temperature=0, ignore_eos=True),
            chance.randint(0, 20) if chance.random() < 0.2 else None,  # pieces after which nobody wants more
        )
        for _ in range(2000)
    ]
    model = small().cuda()
    limits: dict[str, Any] = {"page_size": 4, "cache_gib": 80 * memory.page_bytes(model, 4) / 2**30}
    engine = Engine(model, settings=Settings(token_budget=64, most_running=16, most_waiting=64, **limits))
    found: dict[int, list[int]] = {}

    def ask(first: int) -> None:
        for number in range(first, len(requests), 32):
            prompt, params, leaves = requests[number]
            stream, answer = engine.open(prompt, params, wait=True), []
            for piece in stream:
                answer += piece.tokens
                if leaves is not None and len(answer) >= leaves:
                    stream.cancel()
            found[number] = answer

    clients = [threading.Thread(target=ask, args=(first,)) for first in range(32)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    counts, pages = engine._scheduler.counts, engine._scheduler.pages
    engine.close()
    assert pages.used == 0, "pages are leaked"
    assert counts.preempted > 0, "nothing was pre-empted, so that was not tried"
    assert len(found) == 2000
    whole = [number for number, (_, _, leaves) in enumerate(requests) if leaves is None][:200]
    reference = Engine(small(), settings=Settings(cache_gib=0.05))
    expected = reference.generate([requests[each][0] for each in whole], [requests[each][1] for each in whole])
    reference.close()
    assert [found[each] for each in whole] == [list(answer.choices[0].tokens) for answer in expected]


def test_a_capture_that_fails_hinders_no_other() -> None:
    x = torch.zeros(4, device="cuda")

    def fail() -> torch.Tensor:
        x.add_(1)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        Graph(fail, Captures(), None)
    assert Graph(lambda: x + 1, Captures(), None).replay().tolist() == [1] * 4


@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b"])
def test_with_the_usual_settings(name: str) -> None:
    """Of all limits; GPT-2 has learned positions for fewer tokens than a step may have."""
    engine = Engine(small(name).cuda())
    answers = engine.generate(PROMPTS, GREEDY)
    engine.close()
    assert [answer.choices[0].tokens for answer in answers] == tokens(small(name), GREEDY)


def test_the_cache_takes_what_is_left_and_steps_still_fit() -> None:
    taken = torch.empty(torch.cuda.mem_get_info()[0] - 6 * 2**30, dtype=torch.uint8, device="cuda")
    try:
        model = small(context=2**20).bfloat16().cuda()
        engine = Engine(model, settings=Settings(token_budget=8192, most_running=64))
        assert torch.cuda.mem_get_info()[0] < 2 * 2**30, "memory is left over"
        draws = SamplingParams(max_tokens=8, top_p=0.9, logprobs=5, seed=0)
        answers = engine.generate([[number % 256] * 3000 for number in range(64)], draws)
        engine.close()
        assert len(answers) == 64
    finally:
        del taken
        torch.cuda.empty_cache()


def on_two_ranks(name: str, graphs: bool) -> list[tuple[int, ...]]:
    group = dist.group.WORLD
    model = shards.shard(small(name).cuda(), group)
    settings = Settings(**LIMITS | {"graphs": graphs})
    if group.rank() > 0:
        Runner(model, memory.shape(model, settings, group), settings, group=group).follow()
        return []
    engine = Engine(model, settings=settings, group=group)
    answers = engine.generate(PROMPTS, GREEDY)
    engine.close()
    return [answer.choices[0].tokens for answer in answers]


@pytest.mark.parametrize("graphs", [True, False], ids=["pieces of graphs", "no graphs"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b"])
def test_two_ranks_on_one_gpu_write_what_one_process_writes(ranks: Any, name: str, graphs: bool) -> None:
    assert ranks(2, on_two_ranks, name, graphs)[0] == tokens(small(name), GREEDY)
