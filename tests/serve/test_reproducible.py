"""Reproducible: a request's bits depend on nothing but the request, whatever else is served at the time."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.serve import fixed
from echelon.serve.cache import Pages
from echelon.serve.plain import Plain
from echelon.serve.request import SamplingParams
from echelon.serve.sample import Draw, Draws, sample
from echelon.serve.scheduler import Scheduler, Sequence
from echelon.serve.step import Shape
from tests.serve.models import small

PAGES, SIZE = 20, 8


@cache
def plain(name: str) -> Plain:
    return Plain(small(name), Shape(PAGES, SIZE, 6, PAGES), reproducible=True)


def serve(
    name: str, arrivals: list[tuple[int, list[int], int]], budget: int, most_running: int
) -> list[tuple[list[int], list[torch.Tensor]]]:
    """The tokens, and the logits that each was drawn from, of requests that arrive at given steps."""
    computes = plain(name)
    scheduler = Scheduler(Pages(PAGES, SIZE), budget=budget, most_running=most_running)
    sequences = [Sequence(list(prompt), len(prompt) + more) for _, prompt, more in arrivals]
    logits: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    for step in range(10_000):
        for (when, _, _), sequence in zip(arrivals, sequences, strict=True):
            if when == step:
                scheduler.add(sequence)
        spans = scheduler.schedule()
        if not spans:
            if all(when < step for when, _, _ in arrivals):
                break
            continue
        with torch.inference_mode():
            rows = computes.compute([span.part() for span in spans])
        last = [span.sequence for span in spans if span.is_last]
        draws = [
            Draw(SamplingParams(seed=0, top_p=0.9), (1, len(each.tokens)), each.tokens, each.prompt) for each in last
        ]
        chosen = sample(rows, Draws(draws)).result().tokens if last else []
        scheduler.advance(spans)
        for sequence, row, token in zip(last, rows, chosen, strict=True):
            logits[id(sequence)].append(row)
            scheduler.settle(sequence, token)
            if len(sequence.tokens) == sequence.limit:
                scheduler.remove(sequence)
    return [(sequence.tokens, logits[id(sequence)]) for sequence in sequences]


prompts = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=50),
    st.integers(1, 50).map(lambda length: [5] * length),  # which share their beginnings
)
requests = st.tuples(st.integers(0, 12), prompts, st.integers(1, 12))


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "qwen3-0.6b"])
@settings(max_examples=12)
@given(st.lists(requests, min_size=1, max_size=5), st.integers(1, 70), st.integers(1, 6))
def test_the_same_bits_alone_and_in_any_mixture(
    name: str, mixture: list[tuple[int, list[int], int]], budget: int, most_running: int
) -> None:
    together = serve(name, mixture, budget, most_running)
    for (_, prompt, more), (tokens, logits) in zip(mixture, together, strict=True):
        [(tokens_alone, logits_alone)] = serve(name, [(0, prompt, more)], budget=1000, most_running=1)
        assert tokens == tokens_alone
        assert all(torch.equal(one, other) for one, other in zip(logits, logits_alone, strict=True))


def test_pre_emption_is_among_what_was_tried() -> None:
    scheduler = Scheduler(Pages(PAGES, SIZE), budget=70, most_running=6)
    for first in range(0, 240, 40):
        scheduler.add(Sequence(list(range(first, first + 40)), 80))
    for _ in range(60):
        spans = scheduler.schedule()
        scheduler.advance(spans)
        for span in spans:
            if span.is_last:
                scheduler.settle(span.sequence, 0)
                if len(span.sequence.tokens) == span.sequence.limit:
                    scheduler.remove(span.sequence)
    assert scheduler.counts.preempted > 0


@pytest.mark.parametrize("part", ["attention.qkv", "mlp", "mlp_norm"])
def test_a_machine_whose_results_differ_by_place_is_found_out(part: str) -> None:
    model = small()
    module = model.blocks[0].get_submodule(part)
    compute = module.forward
    module.forward = lambda x: compute(x) + torch.arange(len(x)).unsqueeze(1) * 1e-6
    with pytest.raises(ValueError, match=f"a row of `{part.removeprefix('attention.')}` changes with its place"):
        fixed.fix(model)
