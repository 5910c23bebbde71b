"""Any layout equals one process: loss and every gradient, in fp64, for every family and every strategy."""

from __future__ import annotations

import pytest

from tests.parallel.matrix import ROWS, train

CASES = [(family, row) for family, rows in ROWS.items() for row in rows]


@pytest.mark.parametrize(("family", "row"), CASES, ids=[f"{family}, {row.name}" for family, row in CASES])
def test_a_layout_equals_one_process(ranks, family, row):
    for told in ranks(row.layout.size, train, family, row):
        assert told["loss"] <= 1e-9
        assert told["gradient"] <= 1e-9, told["where"]
