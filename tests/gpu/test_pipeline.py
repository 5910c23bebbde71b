"""Pipelines of CUDA tensors, on ranks that share one GPU: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.pipeline.test_run import MICROBATCHES, SYNCHRONOUS, how
from tests.parallel.pipeline.training import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SCHEDULES = [(schedule, {"pp": 2}) for schedule in SYNCHRONOUS]


@pytest.mark.parametrize("family", ["gpt", "resnet"])
@pytest.mark.parametrize(("schedule", "degrees"), [*SCHEDULES, ("1f1b", {"dp": 2, "pp": 2})], ids=str)
def test_a_schedule_equals_one_process(ranks: Any, schedule: str, degrees: dict[str, int], family: str) -> None:
    count = degrees.get("dp", 1) * degrees["pp"]
    for told in ranks(count, train, family, degrees, how(schedule), MICROBATCHES, "cuda", timeout=120):
        assert max(told["errors"].values()) <= 1e-9, told["errors"]
