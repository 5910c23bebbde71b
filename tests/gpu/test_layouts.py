"""Rows of the matrix in bf16 on ranks that share one GPU: the losses of one process in fp32, within bf16's rounding."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.matrix import ROWS, train
from tests.parallel.test_matrix import TOLERANCES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
NAMES = [
    "replicate",
    "shard 2",
    "shard 3",
    "tp",
    "ring",
    "ulysses",
    "dp × tp",
    "dp × ring",
    "shard 3 × tp",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_losses_in_bf16(ranks, family, name):
    [row] = [row for row in ROWS[family] if row.name == name]
    for told in ranks(row.layout.size, train, family, row, "bf16", "adamw", "cuda", timeout=120):
        assert told["loss"] <= TOLERANCES["bf16"]
