"""Perplexity is the exponential of the mean loss, however the text is cut and whoever computes it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from echelon import models
from echelon.models.llama import LlamaConfig
from echelon.parallel import shards
from echelon.serve import perplexity as module
from echelon.serve.perplexity import perplexity

CONFIG = LlamaConfig(vocabulary=61, dim=16, layers=2, heads=4, kv_heads=2, mlp_dim=24)


def model() -> torch.nn.Module:
    return models.build(CONFIG).double().eval()


def text(length: int = 40) -> list[int]:
    return torch.randint(61, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def by_hand(length: int, tokens: list[int]) -> float:
    """Of one piece at a time, from logits."""
    losses = []
    for start in range(0, len(tokens) - 1, length):
        piece = torch.tensor(tokens[start : start + length + 1])
        logits = model()(piece[None, :-1])[0].log_softmax(-1)
        losses += (-logits[range(len(piece) - 1), piece[1:]]).tolist()
    assert len(losses) == len(tokens) - 1
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("length", [1, 8, 13, 39, 100])
@torch.no_grad()
def test_every_token_but_the_first_counts_once(length, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 16)
    assert perplexity(model(), text(), length) == pytest.approx(by_hand(length, text()), rel=1e-12)


def test_who_knows_nothing_is_as_surprised_as_the_vocabulary_is_large():
    ignorant = model()
    torch.nn.init.zeros_(ignorant.head.weight)
    assert perplexity(ignorant, torch.tensor(text()), 8) == pytest.approx(61, rel=1e-12)


@pytest.mark.parametrize(("tokens", "length"), [([3], 8), ([], 8), ([1, 2, 3], 0)])
def test_what_cannot_be_measured_is_refused(tokens, length):
    with pytest.raises(ValueError, match="perplexity needs two tokens"):
        perplexity(model(), tokens, length)


def of_shards() -> float:
    return perplexity(shards.shard(model(), dist.group.WORLD), text(), 8)


def test_ranks_that_share_a_model_all_get_the_answer(ranks):
    assert ranks(2, of_shards) == pytest.approx([perplexity(model(), text(), 8)] * 2, rel=1e-12)
