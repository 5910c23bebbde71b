"""The example, as it is run: its gradients and its loss are those of one process, and it draws its schedule."""

from __future__ import annotations

import re

import pytest

from tests.launch.jobs import ROOT, echelon


@pytest.mark.parametrize(
    ("ranks", "schedule", "begins"),
    [
        (4, ["1f1b"], "rank 0  F0F1F2F3            B0"),
        (4, ["chimera"], "rank 0  F0F2  f1b1"),
        (2, ["interleaved", "--chunks", 2, "--microbatches", 4], "rank 0  F0F1F0F1F2"),
    ],
)
def test_the_example_equals_one_process(ranks, schedule, begins):
    job = echelon("run", "-n", ranks, ROOT / "examples" / "pipeline.py", "--schedule", *schedule, timeout=240)
    assert job.returncode == 0, job.stderr
    assert job.stdout.startswith(begins)
    errors = re.findall(r"gradients differ from one process by (\S+)", job.stdout)
    assert len(errors) == ranks
    assert max(map(float, errors)) <= 1e-12
    [(loss, alone)] = re.findall(r"loss (\S+), of one process (\S+)", job.stdout)
    assert loss == alone
