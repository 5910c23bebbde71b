"""The meter on real ranks: rows, what they count, resuming, the record of a window of steps."""

from __future__ import annotations

import itertools
import json
import math
import time
import types
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from echelon.comm.recorder import recorder
from echelon.comm.records import Record, now
from echelon.comm.records import read as read_record
from echelon.models.presets import build
from echelon.parallel.layout import Grid, Layout
from echelon.plan.flops import training_flops
from echelon.train import config, metrics, rows
from tests.groups import keep_groups

MODEL = {"name": "gpt2", "layers": 1, "dim": 32, "heads": 2, "vocabulary": 61, "context": 16}
PAYLOAD = 4096  # bytes that a step of `training` sums over two ranks: a ring sends as many


def a_config(**train: Any) -> config.Config:
    tables = {"model": MODEL, "train": {"steps": 7, "batch": 4, "log_every": 3} | train}
    return config.parse(tables | {"record": {"first": 3, "steps": 3}})


@cache
def grid_of(ranks: int) -> Grid:
    grid = Layout(dp=ranks).build()
    keep_groups()
    return grid


def plain() -> torch.nn.Module:
    with torch.device("meta"):
        return build(a_config().architecture)


def a_meter(folder: str, step: int = 0, **train: Any) -> metrics.Meter:
    grid = grid_of(dist.get_world_size())
    with mock.patch.object(metrics, "peak_flops", return_value=1e9):
        return metrics.Meter(a_config(**train), Path(folder), grid, plain(), step=step)


def training(folder: str, begin: int, end: int, losses: dict[int, float]) -> None:
    meter, parameter = a_meter(folder, begin), torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter])
    for step in range(begin + 1, end + 1):
        dist.all_reduce(torch.ones(PAYLOAD // 4), group=grid_of(dist.get_world_size()).mesh("data").get_group())
        optimizer.step()
        meter.step(step, losses.get(step, 10.0 - step), 0.5, 1e-3)
    meter.close()


def of_kind(folder: Path, kind: str) -> list[rows.Row]:
    return [row for row in rows.read(folder / rows.FILE) if row["kind"] == kind]


def test_rows(ranks, tmp_path):
    ranks(2, training, str(tmp_path), 0, 7, {})
    start, *steps = rows.read(tmp_path / rows.FILE)
    assert (start["kind"], start["step"], start["ranks"], start["layout"]) == ("start", 0, 2, "Layout(dp=2)")
    assert [row["step"] for row in steps] == [1, 3, 6, 7]
    operations = 4 * training_flops(plain(), length=16)
    for row in steps:
        assert (row["loss"], row["norm"], row["lr"]) == (10.0 - row["step"], 0.5, 1e-3)
        assert row["tokens_s"] * row["step_s"] == pytest.approx(4 * 16)
        assert row["mfu"] * row["step_s"] * 2e9 == pytest.approx(operations)  # two ranks, each of 1e9 a second
        assert row["wire"] == {"data": PAYLOAD}
        assert row["memory"] > 2**20
        assert 0 < row["exposed"] < 1
    assert sorted(row["time"] for row in steps) == [row["time"] for row in steps]


def test_a_number_that_is_none_is_null(ranks, tmp_path):
    ranks(2, training, str(tmp_path), 0, 3, {1: math.nan, 3: math.inf})
    assert "NaN" not in (tmp_path / rows.FILE).read_text()
    assert [row["loss"] for row in of_kind(tmp_path, "step")] == [None, None]


def test_a_run_that_goes_on_says_nothing_twice(ranks, tmp_path):
    ranks(2, training, str(tmp_path), 0, 6, {})
    with (tmp_path / rows.FILE).open("a") as file:
        file.write('{"kind": "step", "st')  # as a killed job leaves it
    ranks(2, training, str(tmp_path), 3, 7, {})
    assert [row["step"] for row in of_kind(tmp_path, "step")] == [1, 3, 6, 7]
    assert [row["step"] for row in of_kind(tmp_path, "start")] == [0, 3]
    assert all(json.loads(line) for line in (tmp_path / rows.FILE).read_text().splitlines())


def test_the_record_is_of_its_window(ranks, tmp_path):
    ranks(2, training, str(tmp_path), 0, 7, {})
    logs = read_record(tmp_path / "record")
    assert sorted(logs) == [0, 1]
    for log in logs.values():
        assert len(log.steps) == 3
        assert [(record.dimension, record.payload) for record in log if record.dimension] == [("data", PAYLOAD)] * 3


def test_a_run_that_goes_on_keeps_the_record_of_steps_behind_it(ranks, tmp_path):
    ranks(2, training, str(tmp_path), 0, 6, {})
    before = {file.name: file.read_bytes() for file in (tmp_path / "record").iterdir()}
    ranks(2, training, str(tmp_path), 6, 7, {})
    assert {file.name: file.read_bytes() for file in (tmp_path / "record").iterdir()} == before


def test_a_run_that_begins_again_on_fewer_ranks_leaves_no_record_of_more(ranks, tmp_path):
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "rank-7.json").write_text("{}")
    ranks(2, training, str(tmp_path), 2, 6, {})
    assert sorted(read_record(tmp_path / "record")) == [0, 1]


def blocked(folder: str) -> None:
    """Records made by hand: rank r was blocked for r + 1 milliseconds in tp, and longer where it does not count."""
    seconds = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(seconds)), time=time.time)
    with mock.patch.object(metrics, "time", clock):  # a step takes a second
        meter, rank = a_meter(folder), dist.get_rank()
        for dimension, milliseconds in (("tp", rank + 1), ("", 1000)):
            made = Record("all_reduce", "0", dimension, (0, 1), "float32", 4, now(), wire=100 * (rank + 1))
            made.ended, made.blocked = now(), milliseconds * 10**6
            recorder.add(made)
        meter.step(1, 1.0, 1.0, 1.0)
        meter.close()


def test_exposed_and_wire_are_means_over_the_ranks_and_of_the_layouts_groups(ranks, tmp_path):
    ranks(2, blocked, str(tmp_path))
    [row] = of_kind(tmp_path, "step")
    assert row["step_s"] == 1
    assert row["exposed"] == pytest.approx(0.0015)
    assert row["wire"] == {"tp": 150}


def with_evaluation(folder: str) -> None:
    meter = a_meter(folder)
    meter.step(1, 1.0, 1.0, 1.0)
    dist.all_reduce(torch.ones(10**5), group=grid_of(2).mesh("data").get_group())
    meter.event("eval", 1, loss=2.5)
    meter.step(2, 1.0, 1.0, 1.0)
    meter.step(3, 1.0, 1.0, 1.0)
    meter.close()


def test_an_evaluation_is_no_traffic_of_training(ranks, tmp_path):
    ranks(2, with_evaluation, str(tmp_path))
    assert [row["wire"] for row in of_kind(tmp_path, "step")] == [{}, {}]
    assert [row["loss"] for row in of_kind(tmp_path, "eval")] == [2.5]


def with_energy(folder: str) -> int:
    """A counter that gives a joule more at every reading; both ranks are on one node."""
    read = [0]

    def joules() -> float:
        read[0] += 1
        return float(read[0])

    counter = types.SimpleNamespace(name="CPU (RAPL)", joules=joules)
    with mock.patch.object(metrics, "open_rapl", return_value=counter):
        training(folder, 0, 3, {})
    return read[0]


def test_one_rank_of_a_node_reads_its_energy(ranks, tmp_path):
    first, second = ranks(2, with_energy, str(tmp_path))
    assert (first, second) == (3, 0)
    assert of_kind(tmp_path, "start")[0]["energy"] == ["CPU (RAPL)"]
    one, two = of_kind(tmp_path, "step")
    assert (one["joules"], one["tokens_joule"]) == (1, 4 * 16)
    assert (two["joules"], two["tokens_joule"]) == (1, 2 * 4 * 16)


def without_energy(folder: str) -> None:
    with mock.patch.object(metrics, "open_rapl", return_value=None):
        training(folder, 0, 1, {})


def test_without_a_counter_there_are_no_joules(ranks, tmp_path):
    ranks(2, without_energy, str(tmp_path))
    assert not {"joules", "tokens_joule"} & of_kind(tmp_path, "step")[0].keys()


def place(host: str, gpu: str) -> metrics.Place:
    return metrics.Place(host, gpu, 1.0, ())


def test_ranks_that_share_a_gpu_count_it_once():
    places = [place("a", "x"), place("a", "x"), place("a", "y"), place("b", "x")]
    assert [metrics._leads(places, rank, by_gpu=True) for rank in range(4)] == [True, False, True, True]
    assert [metrics._leads(places, rank, by_gpu=False) for rank in range(4)] == [True, False, False, True]
    cores = [place("a", ""), place("a", "")]
    assert [metrics._leads(cores, rank, by_gpu=True) for rank in range(2)] == [True, True]


def test_the_curves_of_tensorboard():
    row = {"kind": "step", "step": 3, "time": 1.0, "loss": 2.0, "norm": None, "wire": {"dp": 7}}
    assert metrics._scalars(row) == {"loss": 2.0, "wire/dp": 7}
    assert metrics._scalars({"kind": "eval", "step": 3, "time": 1.0, "loss": 2.0}) == {"eval/loss": 2.0}
    assert metrics._scalars({"kind": "start", "step": 0, "ranks": 2}) == {}
