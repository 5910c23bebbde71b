"""memory.json of real ranks: what is measured between backward and the step equals the plan."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.models.presets import build
from echelon.parallel import batch
from echelon.parallel.apply import parallelize
from echelon.parallel.layout import Grid, Layout
from echelon.parallel.optimizer import Optimizer
from echelon.train import config
from echelon.train.checks import check
from echelon.train.memory import measure_memory
from tests.groups import keep_groups

MODEL = {"name": "gpt2", "layers": 2, "dim": 32, "heads": 4, "vocabulary": 64, "context": 16}


@cache
def grid_of(tp: int) -> Grid:
    grid = Layout(dp=-1, tp=tp).build()
    keep_groups()
    return grid


def measured(strategies: dict[str, Any], optimizer: dict[str, Any], tp: int) -> dict[str, Any]:
    tables = {"model": MODEL, "strategies": strategies, "optimizer": optimizer, "train": {"batch": 4}}
    told = check(config.parse(tables | {"layout": {"tp": tp}}), dist.get_world_size())
    grid = grid_of(tp)
    model = parallelize(build(told.architecture), grid, told.strategies)
    update = Optimizer(partial(torch.optim.AdamW, lr=1e-3), model, on_cpu=told.optimizer.on_cpu)
    tokens = torch.zeros(4, 17, dtype=torch.int64)
    mine = batch.part({"tokens_BS": tokens[:, :-1], "targets_BS": tokens[:, 1:]}, grid)
    model(**mine).backward()
    update.step()
    model(**mine).backward()
    return measure_memory(told, grid, model, update)


@pytest.mark.parametrize(
    ("strategies", "optimizer", "tp"),
    [
        ({"stage": 0}, {}, 1),
        ({"stage": 1}, {}, 1),
        ({"stage": 2, "precision": "bf16"}, {}, 1),
        ({"stage": 3}, {}, 1),
        ({"stage": 0, "precision": "bf16"}, {}, 2),
        ({"stage": 0}, {"on_cpu": True}, 1),
    ],
)
def test_what_was_predicted_is_held(ranks, strategies, optimizer, tp):
    first, second = ranks(2, measured, strategies, optimizer, tp)
    assert first == second
    for figures in first.values():
        for kind in ("parameters", "gradients", "optimizer", "host"):
            assert figures["measured"][kind] == pytest.approx(figures["predicted"][kind], rel=0.02)
        assert (figures["measured"]["host"] > 0) == bool(optimizer)
        assert figures["measured"]["rest"] > figures["predicted"]["rest"] > 0  # of a process, libraries are in it


def test_fp64_has_no_prediction(ranks):
    first, _ = ranks(2, measured, {"precision": "fp64"}, {}, 1)
    assert first["largest"]["predicted"] is None
    assert first["largest"]["measured"]["parameters"] > 0
