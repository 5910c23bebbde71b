"""memory.json of real ranks: what is measured between backward and the step equals the plan."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.models.presets import build
from echelon.parallel import batch
from echelon.parallel.apply import parallelize, pipeline, summed_over
from echelon.parallel.layout import Grid, Layout
from echelon.parallel.optimizer import Optimizer
from echelon.train import config
from echelon.train.checks import check, passes
from echelon.train.memory import measure_memory, predicted
from echelon.train.passes import Passes
from tests.groups import keep_groups

MODEL = {"name": "gpt2", "layers": 2, "dim": 32, "heads": 4, "vocabulary": 64, "context": 16}


@cache
def grid_of(layout: Layout) -> Grid:
    grid = layout.build()
    keep_groups()
    return grid


def told(strategies: dict[str, Any], optimizer: dict[str, Any], layout: dict[str, int], ranks: int) -> config.Config:
    tables = {
        "model": MODEL | {"tied": strategies.get("schedule") != "pipedream"},
        "optimizer": optimizer,
        "layout": layout,
    }
    return check(config.parse(tables | {"strategies": strategies, "train": {"batch": 8, "clip": 0.0}}), ranks)


def measured(strategies: dict[str, Any], optimizer: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    how = told(strategies, optimizer, layout, dist.get_world_size())
    grid = grid_of(how.layout)
    model = parallelize(build(how.architecture), grid, how.strategies)
    update = Optimizer(partial(torch.optim.AdamW, lr=1e-3), model, on_cpu=how.optimizer.on_cpu)
    runner = pipeline(model, grid, how.strategies, passes(how)) if how.layout.pp > 1 else None
    through = Passes(model, update, summed_over(grid, how.strategies), runner)
    tokens = torch.zeros(8 // passes(how), 17, dtype=torch.int64)
    mine = [batch.part({"tokens_BS": tokens[:, :-1], "targets_BS": tokens[:, 1:]}, grid)] * passes(how)
    through.run(mine)
    through.update(None)
    through.run(mine)
    return measure_memory(how, grid, model, update, predicted(how, ranks=[grid.rank]))


@pytest.mark.parametrize(
    ("strategies", "optimizer", "layout"),
    [
        ({"stage": 0}, {}, {}),
        ({"stage": 1}, {}, {}),
        ({"stage": 2, "precision": "bf16"}, {}, {}),
        ({"stage": 3}, {}, {}),
        ({"stage": 0, "precision": "bf16"}, {}, {"tp": 2}),
        ({"stage": 0}, {"on_cpu": True}, {}),
        ({"schedule": "1f1b", "precision": "bf16"}, {}, {"pp": 2}),
        ({"schedule": "chimera"}, {}, {"pp": 2}),
        ({"schedule": "zero-bubble", "stage": 2}, {}, {"pp": 2, "dp": 2}),
        ({"schedule": "interleaved", "chunks": 2, "stage": 1}, {}, {"pp": 2, "dp": 2}),
    ],
)
def test_what_was_predicted_is_held(ranks, strategies, optimizer, layout):
    first, *others = ranks(4 if len(layout) > 1 else 2, measured, strategies, optimizer, layout)
    assert all(other == first for other in others)
    for figures in first.values():
        for kind in ("parameters", "gradients", "optimizer", "host"):
            assert figures["measured"][kind] == pytest.approx(figures["predicted"][kind], rel=0.02)
        assert (figures["measured"]["host"] > 0) == bool(optimizer)
        assert figures["measured"]["rest"] > figures["predicted"]["rest"] > 0  # of a process, libraries are in it


def test_fp64_has_no_prediction(ranks):
    first, _ = ranks(2, measured, {"precision": "fp64"}, {}, {})
    assert first["largest"]["predicted"] is None
    assert first["largest"]["measured"]["parameters"] > 0


def test_a_pipeline_at_its_peak():
    """Activations of as many microbatches as a stage has under way, and the weights of as many versions."""
    one, gpipe, synchronous, versions = (
        predicted(each, at_peak=True)
        for each in (
            told({"schedule": "1f1b"}, {}, {"pp": 1}, 1),
            *(told({"schedule": schedule}, {}, {"pp": 2}, 2) for schedule in ("gpipe", "1f1b")),
            told({"schedule": "pipedream"}, {}, {"pp": 2}, 2),
        )
    )
    of_a_sample = one[0]["rest"] / 8 / 2  # in each of two blocks
    assert [rank["rest"] / of_a_sample for rank in gpipe] == [8, 8]
    assert [rank["rest"] / of_a_sample for rank in synchronous] == [2, 1]
    assert [rank["parameters"] for rank in versions] == [2 * synchronous[0]["parameters"], versions[1]["parameters"]]
