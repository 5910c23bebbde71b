"""Serving on a GPU: the tokens are those of the CPU, with everything in the mixture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.serve.engine import Engine
from echelon.serve.request import SamplingParams
from echelon.serve.settings import Settings
from tests.serve.models import SHAPES, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PROMPTS = [[7], list(range(16)), list(range(40, 57)), list(range(100, 170))]


def tokens(model: Any, params: SamplingParams, **settings: Any) -> list[tuple[int, ...]]:
    engine = Engine(model, settings=Settings(cache_gib=0.02, token_budget=24, most_running=3, **settings))
    answers = engine.generate(PROMPTS, params)
    engine.close()
    return [choice.tokens for answer in answers for choice in answer.choices]


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_are_those_of_the_cpu(name: str) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    assert tokens(small(name).cuda(), greedy) == tokens(small(name), greedy)


def test_chance_is_that_of_the_cpu() -> None:
    params = SamplingParams(max_tokens=16, seed=5, n=2, top_k=40, min_p=0.01, repetition_penalty=1.2, ignore_eos=True)
    assert tokens(small().cuda(), params) == tokens(small(), params)


@pytest.mark.parametrize("reproducible", [False, True], ids=["fast", "reproducible"])
def test_bf16_is_served(reproducible: bool) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    model = small().bfloat16()
    found = tokens(model.cuda(), greedy, reproducible=reproducible)
    assert [len(each) for each in found] == [24] * len(PROMPTS)
