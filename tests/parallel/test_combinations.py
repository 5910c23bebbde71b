"""Tiles, layers, pipelines and both directions at once equal one process with the same microbatches, for five steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.parallel.apply import Strategies, part_of
from echelon.parallel.layout import Layout, Stage
from echelon.parallel.tiling import crews_of
from echelon.plan.images import Images
from echelon.plan.traffic import traffic
from tests.parallel.combinations import COMBINATIONS, MORE, SAMPLES, TILES, build, microbatch, strategies_of, train

EXACT = 1e-9


def equals_one_process(ranks: Any, family: str, name: str) -> list[dict[str, Any]]:
    """In all that is computed; and it sends and keeps what the plan says."""
    degrees, schedule, microbatches = (COMBINATIONS | MORE)[name]
    layout, strategies = Layout(**degrees), strategies_of(schedule)
    told: list[dict[str, Any]] = ranks(layout.size, train, family, name)
    with torch.device("meta"):
        model = build(family)
    example = {key: each.to("meta") for key, each in microbatch(family, 0, 0, SAMPLES).items()}
    if layout.depth == 1:
        microbatches = 1
    batch = microbatches * SAMPLES * layout.dp
    images = Images(model, layout, strategies, example)
    for rank, each in enumerate(told):
        assert max(each["errors"].values()) < EXACT, each["errors"]
        planned = traffic(
            model, layout, strategies, batch, rank=rank, microbatches=microbatches, example=example, images=images
        )
        assert each["traffic"] == planned
        part = part_of(model, layout, strategies, rank, microbatches, example)
        assert each["kept"] == part.most([*images.passes(rank, part).kept.values()])
    return told


@pytest.mark.parametrize("family", ["resnet", "amoebanet", "unet"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_equals_one_process(ranks: Any, name: str, family: str) -> None:
    equals_one_process(ranks, family, name)


@pytest.mark.parametrize("name", MORE)
def test_with_data_parallelism_and_other_stages(ranks: Any, name: str) -> None:
    equals_one_process(ranks, "unet" if name == "ever more tiles" else "resnet", name)


def test_in_both_directions_the_mirrored_rank_holds_the_same(ranks: Any) -> None:
    told = equals_one_process(ranks, "resnet", "SP+GEMS+LP")
    for rank, each in enumerate(told):
        assert each["holds"] == told[len(told) - 1 - rank]["holds"]
    crews = crews_of(Layout(**TILES))
    for rank in range(crews.ranks):
        assert crews.place(rank, "up") == crews.place(crews.ranks - 1 - rank, "down")


def test_the_stages_of_crews_are_where_they_say() -> None:
    crews = crews_of(Layout(stages=[Stage(sp=(2, 2)), Stage(sp=2), Stage()]))
    assert [crews.crew(stage).ranks for stage in range(3)] == [(0, 1, 2, 3), (4, 5), (6,)]
    assert [crews.crew(stage, "up").ranks for stage in range(3)] == [(3, 4, 5, 6), (1, 2), (0,)]
    assert crews_of(Layout(pp=2, sp=2)).ranks == 2
    assert Strategies(schedule="gems-gpipe").schedule == "gems-gpipe"
