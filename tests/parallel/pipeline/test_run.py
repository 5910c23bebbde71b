"""A pipeline of any schedule equals one process with the same microbatches, to the last digits of fp64."""

from __future__ import annotations

import pytest

from tests.parallel.pipeline.training import train

SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "chimera"]


def how(schedule: str, **more: object) -> dict[str, object]:
    return {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1, **more}


@pytest.mark.parametrize("family", ["gpt", "resnet"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_schedule_equals_one_process(ranks, schedule, stages, family):
    for told in ranks(stages, train, family, {"pp": stages}, how(schedule), 4):
        assert max(told["errors"].values()) <= 1e-9, told["errors"]
