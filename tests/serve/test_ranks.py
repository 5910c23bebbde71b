"""Ranks that share a model: the first serves, the others follow, rest when there is nothing to do, and end with it."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from echelon.parallel import shards
from echelon.serve import memory
from echelon.serve.engine import Engine
from echelon.serve.request import SamplingParams
from echelon.serve.runner import Runner
from echelon.serve.settings import Settings
from tests.serve.models import small

SETTINGS = Settings(cache_gib=0.002, token_budget=24, most_running=4)
REPRODUCIBLE = Settings(cache_gib=0.002, token_budget=24, most_running=4, reproducible=True)
PROMPTS = [[7], list(range(16)), list(range(40, 100)), list(range(40, 110))]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def generate_on_ranks(name: str, settings: Settings, pause: float) -> tuple[list[tuple[int, ...]], float]:
    """The tokens, on the first rank; and the share of the pause in which a rank kept a core busy."""
    group = dist.group.WORLD
    model = shards.shard(small(name), group)
    if group.rank() > 0:
        before = os.times()
        Runner(model, memory.shape(model, settings, group), settings, group=group).follow()
        after = os.times()
        return [], after.user + after.system - before.user - before.system
    engine = Engine(model, settings=settings, group=group)
    first = engine.generate(PROMPTS, GREEDY)
    time.sleep(pause)
    again = engine.generate(PROMPTS, GREEDY)
    engine.close()
    assert [each.choices for each in first] == [each.choices for each in again]
    return [answer.choices[0].tokens for answer in first], 0.0


@pytest.mark.parametrize("settings", [SETTINGS, REPRODUCIBLE], ids=["fast", "reproducible"])
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_ranks_write_what_one_process_writes(ranks, name: str, settings: Settings) -> None:  # type: ignore[no-untyped-def]
    engine = Engine(small(name), settings=settings)
    expected = [answer.choices[0].tokens for answer in engine.generate(PROMPTS, GREEDY)]
    engine.close()
    (tokens, _), _ = ranks(2, generate_on_ranks, name, settings, 0.0)
    assert tokens == expected


def test_ranks_rest_when_there_is_nothing_to_do(ranks) -> None:  # type: ignore[no-untyped-def]
    _, (_, without) = ranks(2, generate_on_ranks, "gpt2", SETTINGS, 0.0)
    _, (_, resting) = ranks(2, generate_on_ranks, "gpt2", SETTINGS, 4.0)
    assert resting - without < 2.5, "a core was kept busy for more than the second after which it should not be"
