"""Any layout equals one process: loss and every gradient, in fp64, for every family and every strategy."""

from __future__ import annotations

import pytest
import torch

from echelon.plan.traffic import traffic
from tests.parallel.matrix import LENGTH, ROWS, build, train, wider

CASES = [(family, row) for family, rows in ROWS.items() for row in rows]
WIDER = [(family, row) for family in ("gpt", "llama", "bert") for row in wider()]


@pytest.mark.parametrize(
    ("family", "row"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in WIDER)],
    ids=[f"{family}, {row.name}" for family, row in [*CASES, *WIDER]],
)
def test_a_layout_equals_one_process(ranks, family, row):
    length = LENGTH if family in ("gpt", "llama", "bert") else 17
    with torch.device("meta"):
        model = build(family)
    for rank, told in enumerate(ranks(row.layout.size, train, family, row)):
        assert told["loss"] <= 1e-9
        assert told["gradient"] <= 1e-9, told["where"]
        assert told["norm"] <= 1e-9
        assert told["traffic"] == traffic(model, row.layout, row.strategies, row.batch, length, rank)


# Of the loss, relative, in five steps of AdamW, in which it falls by a fifth or more; bf16 beside one process in fp32.
TOLERANCES = {"fp32": 2e-6, "bf16": 1e-2}


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(
    ("family", "row"),
    [
        case if case[0] == "gpt" and case[1].layout.size < 8 else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
    ids=[f"{family}, {row.name}" for family, row in CASES],
)
def test_losses_in_lower_precision(ranks, family, row, precision):
    for told in ranks(row.layout.size, train, family, row, precision, "adamw"):
        assert told["loss"] <= TOLERANCES[precision]
