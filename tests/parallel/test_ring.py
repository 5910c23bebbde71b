"""Ring attention: who computes what, and when keys travel. That it is right is tested in `test_sequence.py`, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import echelon.comm
from echelon.parallel import blocks
from tests.parallel.attention import EXACT, attention_errors, qkv, scattered_attention, shape, world


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
def test_a_ring_of_three(ranks: Any, causal: bool) -> None:
    for errors in ranks(3, attention_errors, "ring", shape((4, 2)), causal, torch.float64):
        assert max(errors) < EXACT


def plain_ring_errors() -> list[float]:
    with sdpa_kernel(SDPBackend.MATH):
        return attention_errors("ring", shape((4, 2)), True, torch.float64)


def test_a_ring_without_kernels(ranks: Any) -> None:
    for errors in ranks(2, plain_ring_errors):
        assert max(errors) < EXACT


def computed_scores(causal: bool, length: int) -> tuple[int, int]:
    """How many scores this rank computes, forward and backward; of a square with a diagonal, half."""
    counts = [0, 0]
    originals = blocks.forward, blocks.backward

    def counting(index: int, *tensors: Tensor, causal: bool) -> Any:
        scores = tensors[0].shape[2] * tensors[-1].shape[2]
        counts[index] += scores // 2 if causal else scores
        return originals[index](*tensors, causal=causal)

    blocks.forward, blocks.backward = functools.partial(counting, 0), functools.partial(counting, 1)
    try:
        scattered_attention(world(), "ring", qkv(shape((2, 2), length), torch.float64), causal)
    finally:
        blocks.forward, blocks.backward = originals
    return counts[0], counts[1]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_causal_ring_gives_all_ranks_equally_much_to_compute(ranks: Any, n: int) -> None:
    length = 24
    counts = ranks(n, computed_scores, True, length)
    assert counts == [(length**2 // 2 // n, length**2 // 2 // n)] * n
    assert ranks(n, computed_scores, False, length) == [(length**2 // n, length**2 // n)] * n


def sent_before_each_block() -> list[int]:
    """How many messages this rank had begun to send when it computed each block of the forward pass."""
    counts, original = [], blocks.forward

    def counting(*tensors: Tensor, causal: bool) -> Any:
        counts.append(sum(record.operation == "send" for record in log))
        return original(*tensors, causal=causal)

    blocks.forward = counting
    try:
        with echelon.comm.record() as log:
            scattered_attention(world(), "ring", qkv(shape((2, 2)), torch.float64), True)
    finally:
        blocks.forward = original
    return counts


def test_the_next_keys_are_under_way_while_a_rank_computes(ranks: Any) -> None:
    assert ranks(4, sent_before_each_block) == [[1, 2, 3, 3]] * 4
