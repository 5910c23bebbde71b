"""Sampling: each filter against its definition, drawn shares against probabilities, and rows that are independent."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from echelon.models import counter
from echelon.serve.request import SamplingParams
from echelon.serve.sample import Draw, Draws, _penalize, sample

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0])
DRAWS = 4000


def drawn(params: SamplingParams, logits: torch.Tensor = LOGITS, tokens: list[int] | None = None) -> dict[int, float]:
    """The shares of the tokens in many draws, each with a seed of its own."""
    draws = [Draw(params, counter.name_key(seed, "0"), [0] if tokens is None else tokens, 1) for seed in range(DRAWS)]
    found = Counter(sample(logits.expand(DRAWS, -1), Draws(draws)).result().tokens)
    return {token: count / DRAWS for token, count in found.items()}


def check(shares: dict[int, float], expected: torch.Tensor) -> None:
    assert set(shares) <= {token for token, share in enumerate(expected.tolist()) if share > 0}
    for token, share in enumerate(expected.tolist()):
        assert shares.get(token, 0.0) == pytest.approx(share, abs=4 * (share * (1 - share) / DRAWS) ** 0.5 + 1e-9)


def test_shares_are_the_probabilities() -> None:
    check(drawn(SamplingParams()), LOGITS.softmax(-1))
    check(drawn(SamplingParams(temperature=2.5)), (LOGITS / 2.5).softmax(-1))


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 2**31 - 1}, 5),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.7}, 2),
        ({"top_p": 0.95}, 3),
        ({"min_p": 0.2}, 2),
        ({"min_p": 0.1, "top_k": 2}, 2),
        ({"min_p": 1.0}, 1),
    ],
)
def test_filters_keep_the_likeliest(changes: dict[str, Any], kept: int) -> None:
    expected = LOGITS.clone()
    expected[kept:] = -torch.inf
    check(drawn(SamplingParams(**changes)), expected.softmax(-1))


@pytest.mark.parametrize("changes", [{"temperature": 0}, {"temperature": 1e-50}, {"top_p": 1e-46}, {"top_k": 1}])
def test_the_likeliest_alone(changes: dict[str, Any]) -> None:
    logits = LOGITS.flip(0)
    assert drawn(SamplingParams(**changes), logits) == {4: 1.0}


def test_penalties() -> None:
    tokens = [3, 0, 1, 1]  # the first is the prompt's
    repeated = LOGITS.clone()
    repeated[[0, 1]] /= 2
    repeated[3] *= 2
    check(drawn(SamplingParams(repetition_penalty=2), tokens=tokens), repeated.softmax(-1))
    present = LOGITS - torch.tensor([1.5, 1.5, 0, 0, 0])
    check(drawn(SamplingParams(presence_penalty=1.5), tokens=tokens), present.softmax(-1))
    frequent = LOGITS - torch.tensor([0.5, 1.0, 0, 0, 0])
    check(drawn(SamplingParams(frequency_penalty=0.5), tokens=tokens), frequent.softmax(-1))


def test_penalties_of_sequences_that_grow() -> None:
    """What was counted for earlier steps, and of many sequences at once, is as if it were counted anew, and alone."""
    chance = random.Random(0)
    kinds = [
        SamplingParams(presence_penalty=1.0),
        SamplingParams(),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.25),
    ]
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    draws = [Draw(kinds[row % 3], (row, 0), [chance.randrange(12) for _ in range(4)], 1 + row // 2) for row in range(6)]
    for _ in range(20):
        found = _penalize(logits, draws)
        for row, draw in enumerate(draws):
            expected = logits[row].clone()
            for token in set(draw.tokens):
                count, params = draw.tokens[draw.prompt :].count(token), draw.params
                by = params.repetition_penalty
                expected[token] *= by if expected[token] < 0 else 1 / by
                expected[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
            assert found[row].tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)
            draw.tokens.append(chance.randrange(12))


def test_rows_do_not_depend_on_each_other() -> None:
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, top_k=20, logprobs=2),
        SamplingParams(top_p=0.8, repetition_penalty=1.3),
        SamplingParams(min_p=0.02, presence_penalty=0.4),
    ]
    logits = torch.randn(32, 300, generator=torch.Generator().manual_seed(0)) * 3
    draws = [Draw(kinds[row % 4], counter.name_key(row, "0"), list(range(row + 1)), 1) for row in range(32)]
    together = sample(logits, Draws(draws)).result()
    assert together.logprobs is not None
    for row in range(32):
        alone = sample(logits[row : row + 1], Draws(draws[row : row + 1])).result()
        assert alone.tokens == [together.tokens[row]]
        assert alone.logprobs == (None if row % 4 != 1 else [together.logprobs[row]])


def test_places_go_on_while_the_same_sequences_draw() -> None:
    tokens: list[list[int]] = [[1], [1, 2, 3]]
    draws = Draws(Draw(SamplingParams(), (7, 8 + row), of_row, 1) for row, of_row in enumerate(tokens))
    assert draws.columns()[-3:].tolist() == [[7, 7], [8, 9], [1, 3]]
    for of_row in tokens:
        of_row.append(5)
    assert draws.columns()[-3:].tolist() == [[7, 7], [8, 9], [2, 4]]


def test_the_seed_decides() -> None:
    logits = torch.zeros(1, 1000)

    def at(seed: int, place: int) -> int:
        draws = Draws([Draw(SamplingParams(), counter.name_key(seed, "0"), [0] * place, 1)])
        return sample(logits, draws).result().tokens[0]

    assert at(1, 5) == at(1, 5)
    assert len({at(seed, 5) for seed in range(50)}) > 40
    assert len({at(1, place) for place in range(1, 51)}) > 40
