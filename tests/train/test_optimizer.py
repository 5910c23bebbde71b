"""The optimizer of a run: what decays, the same groups in every stage, and fused as unfused."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.parallel.apply import Strategies, parallelize
from echelon.parallel.layout import Layout
from echelon.train.config import Optimizer
from echelon.train.optimizer import make_optimizer
from tests.parallel.matrix import build, global_batch, grid_of


def groups(family: str, stage: int, tp: int) -> list[tuple[list[str], float]]:
    grid = grid_of(Layout(dp=2, tp=tp), "cpu")
    model = parallelize(build(family), grid, Strategies(stage=stage))  # type: ignore[arg-type]
    made = make_optimizer(model, Optimizer(weight_decay=0.3)).inner
    return [(sorted(group["param_names"]), group["weight_decay"]) for group in made.param_groups]


def expected(family: str) -> list[tuple[list[str], float]]:
    """By the plain model's shapes."""
    shapes = {name: parameter.dim() for name, parameter in build(family).named_parameters()}
    matrices = [name for name, dimensions in shapes.items() if dimensions > 1]
    return [(sorted(matrices), 0.3), (sorted(shapes.keys() - matrices), 0.0)]


@pytest.mark.parametrize(
    ("family", "stage", "tp"),
    [*itertools.product(["gpt", "resnet"], range(4), [1]), ("gpt", 0, 2), ("gpt", 2, 2), ("gpt", 3, 2)],
)
def test_the_groups_are_the_same_in_every_stage(ranks, family, stage, tp):
    for found in ranks(2 * tp, groups, family, stage, tp):
        assert found == expected(family)


def test_a_model_without_vectors_has_one_group():
    model = nn.Linear(3, 3, bias=False)
    [group] = make_optimizer(model, Optimizer()).inner.param_groups
    assert group["param_names"] == ["weight"]
    assert group["weight_decay"] == 0.1


def plain(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """What it should do, by PyTorch's loop over single tensors."""
    parameters = list(model.parameters())
    made: Any = (
        partial(torch.optim.AdamW, betas=settings.betas, eps=settings.eps)
        if settings.kind == "adamw"
        else partial(torch.optim.SGD, momentum=settings.momentum)
    )
    decaying, others = ([each for each in parameters if (each.dim() > 1) is decays] for decays in (True, False))
    pairs = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return made(pairs, lr=settings.lr, foreach=False, fused=False)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_fused_equals_unfused(kind, on_cpu):
    settings = Optimizer(kind=kind, lr=0.01, weight_decay=0.2, on_cpu=on_cpu)
    fused_model, plain_model = build("gpt").double(), build("gpt").double()
    fused, reference = make_optimizer(fused_model, settings), plain(plain_model, settings)
    for step in range(4):
        for model in (fused_model, plain_model):
            loss: Tensor = model(**global_batch("gpt", step, "cpu", torch.float64))
            loss.backward()
        fused.step()
        reference.step()
        reference.zero_grad()
    for one, other in zip(fused_model.parameters(), plain_model.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-10)  # Adam enlarges the rounding of a key's bias
