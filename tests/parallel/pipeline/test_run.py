"""A pipeline of any schedule equals one process with the same microbatches, to the last digits of fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echelon.parallel.apply import Strategies
from echelon.parallel.layout import Layout
from echelon.plan.traffic import traffic
from tests.parallel.pipeline.training import LENGTH, SAMPLES, build, microbatch, train, train_with_versions

MICROBATCHES = 4
SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "gems-gpipe", "chimera"]


def how(schedule: str, **more: object) -> dict[str, object]:
    return {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1, **more}


def equals_one_process(ranks, family: str, schedule: str, degrees: dict[str, int], **more: object) -> None:
    """In all that is computed; and it sends what the plan says."""
    layout, strategies = Layout(**degrees), Strategies(precision="fp64", global_batchnorm=True, **how(schedule, **more))
    model, example = on_meta(family)
    for name in ("tokens_BS", "targets_BS") if layout.cp > 1 else ():
        example[name] = example[name][:, : LENGTH // layout.cp]
    batch = MICROBATCHES * SAMPLES * layout.dp
    for rank, told in enumerate(ranks(layout.size, train, family, degrees, how(schedule, **more), MICROBATCHES)):
        assert max(told["errors"].values()) <= 1e-9, told["errors"]
        planned = traffic(model, layout, strategies, batch, LENGTH, rank, microbatches=MICROBATCHES, example=example)
        assert told["traffic"] == planned


def on_meta(family: str, tied: bool = True) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, and a microbatch of one rank."""
    with torch.device("meta"):
        model = build(family, tied)
    return model, {name: each.to("meta") for name, each in microbatch(family, 0, 0, SAMPLES).items()}


@pytest.mark.parametrize("family", ["gpt", "resnet"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_schedule_equals_one_process(ranks, schedule, stages, family):
    equals_one_process(ranks, family, schedule, {"pp": stages})


@pytest.mark.parametrize("schedule", ["gems", "gems-gpipe"])
def test_a_stage_in_the_middle_goes_both_ways_on_one_rank(ranks, schedule):
    equals_one_process(ranks, "resnet", schedule, {"pp": 3})


COMBINED = {
    "pp × dp": ("1f1b", {"dp": 2, "pp": 2}, {}),
    "gems × dp": ("gems", {"dp": 2, "pp": 2}, {}),
    "chimera × dp": ("chimera", {"dp": 2, "pp": 2}, {}),
    "interleaved × dp": ("interleaved", {"dp": 2, "pp": 2}, {}),
    "zero-bubble × dp": ("zero-bubble", {"dp": 2, "pp": 2}, {}),
    "pp × tp": ("1f1b", {"pp": 2, "tp": 2}, {}),
    "zero-bubble × tp": ("zero-bubble", {"pp": 2, "tp": 2}, {}),
    "gpipe × ring": ("gpipe", {"pp": 2, "cp": 2}, {}),
    "1f1b × ulysses": ("1f1b", {"pp": 2, "cp": 2}, {"sequence": "ulysses"}),
    "pp × shard 1": ("1f1b", {"dp": 2, "pp": 2}, {"stage": 1}),
    "pp × shard 2": ("1f1b", {"dp": 2, "pp": 2}, {"stage": 2}),
    "pp × shard 3": ("1f1b", {"dp": 2, "pp": 2}, {"stage": 3}),
    "gpipe × shard 3": ("gpipe", {"dp": 2, "pp": 2}, {"stage": 3}),
    "interleaved × shard 3": ("interleaved", {"dp": 2, "pp": 2}, {"stage": 3}),
    "zero-bubble × shard 1": ("zero-bubble", {"dp": 2, "pp": 2}, {"stage": 1}),
    "zero-bubble × shard 2": ("zero-bubble", {"dp": 2, "pp": 2}, {"stage": 2}),
    "zero-bubble × shard 3": ("zero-bubble", {"dp": 2, "pp": 2}, {"stage": 3}),
    "pp × dp × tp": ("1f1b", {"dp": 2, "pp": 2, "tp": 2}, {}),
    "interleaved × shard 3 × tp": ("interleaved", {"dp": 2, "pp": 2, "tp": 2}, {"stage": 3}),
    "zero-bubble × shard 3 × tp": ("zero-bubble", {"dp": 2, "pp": 2, "tp": 2}, {"stage": 3}),
    "pp × hybrid shard": ("1f1b", {"dp": 4, "pp": 2, "replicate": 2}, {"stage": 3}),
}


@pytest.mark.parametrize("name", COMBINED)
def test_a_pipeline_with_other_dimensions_equals_one_process(ranks, name):
    schedule, degrees, more = COMBINED[name]
    equals_one_process(ranks, "short gpt", schedule, degrees, **more)


@pytest.mark.parametrize("family", ["gpt", "resnet"])
@pytest.mark.parametrize(("stages", "dp"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_versions_are_those_of_one_process(ranks, schedule, stages, dp, family):
    """And what is sent is what was planned."""
    layout, strategies = Layout(dp=dp, pp=stages), Strategies(precision="fp64", global_batchnorm=True, **how(schedule))
    model, example = on_meta(family, tied=False)
    for rank, told in enumerate(ranks(layout.size, train_with_versions, family, schedule, stages, dp, 8)):
        assert max(told["errors"].values()) <= 1e-9, told["errors"]
        stage = rank // dp
        assert told["copies"] == (stages - stage if schedule == "pipedream" else 2)
        planned = traffic(model, layout, strategies, 8 * SAMPLES * dp, LENGTH, rank, microbatches=8, example=example)
        assert told["traffic"] == planned


@pytest.mark.parametrize(("schedule", "microbatches"), [("pipedream", 1), ("pipedream-2bw", 2)])
def test_one_version_in_a_window_is_an_update_too(ranks, schedule, microbatches):
    for told in ranks(2, train_with_versions, "gpt", schedule, 2, 1, microbatches):
        assert max(told["errors"].values()) <= 1e-9, told["errors"]
