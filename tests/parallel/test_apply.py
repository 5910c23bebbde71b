"""Options that change how a model is computed, not what: recomputation, chunked losses, compilation, accumulation."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.parallel import batch as batches
from echelon.parallel import data
from echelon.parallel.apply import Strategies, parallelize
from echelon.parallel.layout import Layout
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.recompute import recompute
from tests.parallel.matrix import OPTIMIZERS, ROWS, alone, build, global_batch, grid_of, row, targets, train, worse

LAYOUTS = [case for case in ROWS["llama"] if case.name in ("tp", "shard 3", "shard 3 × tp", "dp × ulysses", "ring")]
OPTIONS = {
    "full recomputation": {"recompute": "full"},
    "selective recomputation": {"recompute": "selective"},
    "chunked loss": {"chunk": 5},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", ["gpt", pytest.param("bert", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_an_option_changes_no_number(ranks, case, family, option):
    changed = replace(case, strategies=replace(case.strategies, **OPTIONS[option]))
    for told in ranks(case.layout.size, train, family, changed):
        assert told["loss"] <= 1e-9
        assert told["gradient"] <= 1e-9, told["where"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler for CPUs")
@pytest.mark.parametrize("name", ["replicate", "shard 3", "tp", "ring", "shard 3 × tp"])
def test_compiled_blocks_compute_the_same(ranks, name):
    [case] = [case for case in ROWS["gpt"] if case.name == name]
    changed = replace(case, strategies=replace(case.strategies, compile=True))
    for told in ranks(case.layout.size, train, "gpt", changed, timeout=400):
        assert told["loss"] <= 1e-9
        assert told["gradient"] <= 1e-9, told["where"]


def saved_bytes(how: str) -> int:
    """What forward keeps for backward, of a model with one process."""
    model: Any = recompute(build("gpt"), how)  # type: ignore[arg-type]
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(**global_batch("gpt", 0, "cpu", torch.float32))
    assert loss.isfinite()
    return sum(size for place, size in kept.items() if place not in parameters)


def test_recomputation_keeps_less():
    none, full = saved_bytes("none"), saved_bytes("full")
    assert full < none / 3


def test_recomputation_of_what_has_no_blocks():
    with pytest.raises(ValueError, match="ResNet has no list `blocks`"):
        recompute(build("resnet"), "full")
    with pytest.raises(ValueError, match="none, selective or full, and not 'some'"):
        recompute(build("gpt"), "some")  # type: ignore[arg-type]


def test_options_that_are_none():
    with pytest.raises(ValueError, match="stage=4 is none of 0, 1, 2, 3"):
        Strategies(stage=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sequence='rings' is none of ulysses, ring"):
        Strategies(sequence="rings")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk=0: a chunk has at least one row"):
        Strategies(chunk=0)
    with pytest.raises(ValueError, match="precision='fp8' is none of fp64, fp32, bf16, fp16"):
        Strategies(precision="fp8")  # type: ignore[arg-type]


def refusal(family: str, degrees: dict[str, int], meta: bool = False) -> str:
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = build(family)
    try:
        parallelize(model, grid_of(Layout(**degrees), "cpu"), Strategies())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "degrees", "meta", "message"),
    [
        ("gpt", {"sp": 2}, False, "Layout(sp=2): GPT has sequences of tokens and no images that sp could cut"),
        ("resnet", {"tp": 2}, False, "Layout(tp=2): ResNet has no `blocks`"),
        ("vit", {"cp": 2}, False, "Layout(cp=2): ViT has no sequences of `tokens` that cp could split"),
        ("gpt", {"dp": 2}, True, "stage 0 needs a model with memory"),
        ("gpt", {"dp": 2}, False, ""),
    ],
)
def test_what_a_model_cannot_be_split_over_is_refused(ranks, family, degrees, meta, message):
    for told in ranks(2, refusal, family, degrees, meta):
        assert told.startswith(message)
        assert bool(told) == bool(message)


def accumulated(case: Any, pieces: int) -> float:
    """One step whose batch comes in several backward passes: the largest relative error of a gradient."""
    grid = grid_of(case.layout, "cpu")
    model: Any = parallelize(build("gpt"), grid, case.strategies)
    update = Optimizer(OPTIMIZERS["sgd"], model)
    given = batches.part(global_batch("gpt", 0, "cpu", torch.float64), grid, kind=case.strategies.sequence)
    count = batches.count(targets(given), grid.mesh("data"))
    *first, last = range(pieces)
    cut = {name: tensor.chunk(pieces) for name, tensor in given.items() if name != "positions_S"}

    def backward(piece: int) -> None:
        part = {name: tensors[piece] for name, tensors in cut.items()}
        part |= {"positions_S": given["positions_S"]} if "positions_S" in given else {}
        (model(**part) / count).backward()

    with data.accumulate(model):
        for piece in first:
            backward(piece)
    backward(last)
    gradients = data.full_gradients(model)
    update.step()
    [(_, expected), *_] = alone("gpt", "fp64", "sgd", "cpu")
    worst = 0.0
    for name, gradient in expected.items():
        worst = worse(worst, ((gradients[name] - gradient).norm() / gradient.norm()).item())
    return worst


ACCUMULATED = [
    *(row(f"stage {stage}", stage, dp=2) for stage in range(4)),
    row("tp", tp=2),
    row("shard 3 × tp", 3, dp=2, tp=2),
    row("shard 2 × ring", 2, dp=2, cp=2),
]


@pytest.mark.parametrize("case", ACCUMULATED, ids=lambda case: case.name)
def test_accumulated_gradients_equal_those_of_the_whole_batch(ranks, case):
    assert max(ranks(case.layout.size, accumulated, case, 2)) <= 1e-9
