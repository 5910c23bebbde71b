"""Strategies on CUDA tensors, on ranks that share one GPU: equal to one process, by the GPU's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel import attention, test_batchnorm, test_blocks, test_loss, test_sequence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
KERNELS = {torch.float32: "efficient", torch.bfloat16: "flash", torch.float16: "flash", torch.float64: "plain"}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", KERNELS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("shape", test_blocks.SHAPES.values(), ids=test_blocks.SHAPES.keys())
def test_kernels_equal_plain_operations(
    dtype: torch.dtype, heads: tuple[int, int], shape: tuple[int, int, bool]
) -> None:
    errors = test_blocks.kernel_errors(KERNELS[dtype], dtype, heads, shape, "cuda")
    assert max(errors) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", KERNELS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("kind", test_sequence.KINDS)
def test_attention_equals_one_process(ranks: Any, kind: str, causal: bool, dtype: torch.dtype) -> None:
    shape = attention.shape((4, 2), length=96, head_dim=16)
    for errors in ranks(4, attention.attention_errors, kind, shape, causal, dtype, "cuda", timeout=120):
        assert max(errors) < TOLERANCES[dtype]


def test_a_split_vocabulary_equals_one_process(ranks: Any) -> None:
    for _, errors, _ in ranks(2, test_loss.split_errors, 11, 13, 4, True, False, torch.float64, "cuda"):
        assert max(errors) < test_loss.EXACT


@pytest.mark.parametrize("name", test_batchnorm.LAYERS)
def test_batch_normalisation_equals_one_process(ranks: Any, name: str) -> None:
    for differences in ranks(2, test_batchnorm.errors, name, (3, 4), "cuda"):
        assert {key: value for key, value in differences.items() if value > test_batchnorm.EXACT} == {}
