"""Tiles, layers, pipelines and both directions at once equal one process with the same microbatches, for five steps."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.parallel.apply import Strategies, crews_of
from echelon.parallel.layout import Layout, Stage
from tests.parallel.combinations import COMBINATIONS, MORE, TILES, train

EXACT = 1e-9


def equals_one_process(ranks: Any, family: str, name: str) -> list[dict[str, Any]]:
    layout = Layout(**(COMBINATIONS | MORE)[name][0])
    told: list[dict[str, Any]] = ranks(layout.size, train, family, name)
    for each in told:
        assert max(each["errors"].values()) < EXACT, each["errors"]
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
