"""Every stage trains as one process does: losses, norms, gradients and parameters.

The model (`nets.Net`) has sizes that no number of ranks divides, a parameter of one element, a frozen one, a tied one,
one that a single rank uses and one that none uses.
"""

from __future__ import annotations

import pytest
import torch

from tests.parallel.training import ADAMW, SGD, STRATEGIES, errors, errors_when_split

SIZES = [2, 4, pytest.param(8, marks=pytest.mark.slow)]
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.mark.parametrize("backwards", [1, 2])
@all_strategies
@pytest.mark.parametrize("size", SIZES)
def test_fp64(ranks, strategy, size, backwards):
    for seen in ranks(size, errors, strategy, torch.float64, SGD, 0.5, backwards):
        assert max(seen.values()) < 1e-9, seen


@pytest.mark.parametrize("on_cpu", [False, True])
@all_strategies
def test_fp32(ranks, strategy, on_cpu):
    """Adam divides by a gradient's size: where that is nearly zero, its rounding becomes the update's."""
    for seen in ranks(4, errors, strategy, torch.float32, ADAMW, None, 2, on_cpu):
        assert max(seen.values()) < 2e-5, seen


@pytest.mark.parametrize("on_cpu", [False, True])
@all_strategies
def test_bf16(ranks, strategy, on_cpu):
    """With a master copy in fp32. Gradients are rounded to eight bits on each rank before they are summed."""
    for seen in ranks(4, errors, strategy, torch.bfloat16, ADAMW, 0.5, 2, on_cpu):
        assert max(seen["losses"], seen["norms"]) < 2e-3, seen
        assert seen["gradients"] < 0.06, seen
        assert seen["parameters"] < 0.02, seen


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_mixed_dtypes(ranks, strategy):
    """Blocks in fp32, the rest in fp64."""
    for seen in ranks(2, errors, strategy, torch.float64, SGD, 0.5, 2, False, torch.float32):
        assert max(seen.values()) < 1e-5, seen


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize(
    ("size", "strategy"),
    [(4, strategy) for strategy in STRATEGIES[:4]] + [pytest.param(8, "hybrid", marks=pytest.mark.slow)],
)
def test_split_over_tensor_ranks(ranks, size, strategy, backwards):
    for seen in ranks(size, errors_when_split, strategy, backwards):
        assert max(seen.values()) < 1e-9, seen
