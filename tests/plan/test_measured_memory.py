"""What ranks really hold, beside the plan: every stage, in fp32 and in bf16 with a master copy, on tiny models.

Counted are storages, each once, between a backward pass that accumulates and the next, when all four kinds exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from echelon.parallel import batch as batches
from echelon.parallel import data
from echelon.parallel.apply import Strategies, parallelize
from echelon.parallel.layout import Layout
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.pieces import reducer_of
from echelon.parallel.tensor import split_dimension
from echelon.plan.memory import Training, by_rank, shapes_of
from tests.parallel.matrix import OPTIMIZERS, build, global_batch, grid_of

LAYOUTS = {"dp": {"dp": 4}, "dp × tp": {"dp": 2, "tp": 2}, "dp × cp": {"dp": 2, "cp": 2}}
KV_HEADS = {"gpt": 4, "llama": 2}


def stored(tensors: Iterable[Any]) -> int:
    locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = (tensor.untyped_storage() for tensor in locals_)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measured(family: str, degrees: dict[str, int], stage: int, precision: str) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds."""
    grid = grid_of(Layout(**degrees), "cpu")
    strategies = Strategies(stage=stage, precision=precision)  # type: ignore[arg-type]
    model: Any = parallelize(build(family), grid, strategies)
    update = Optimizer(OPTIMIZERS["adamw"], model)
    given = batches.part(global_batch(family, 0, "cpu", torch.float32), grid)
    model(**given).backward()
    update.step()
    with data.accumulate(model):
        model(**given).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    reducer = reducer_of(model)
    if reducer is not None:
        gradients += [bucket.reduced for bucket in reducer.buckets if bucket.reduced is not None]
    parameters = stored(model.parameters())
    updated = [tensor for group in update.inner.param_groups for tensor in group["params"]]
    masters = [tensor for tensor in updated if tensor.dtype != next(model.parameters()).dtype]
    state = [value for each in update.inner.state.values() for name, value in each.items() if name != "step"]
    return parameters, stored(gradients), stored(masters) + stored(state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", KV_HEADS)
def test_ranks_hold_what_was_planned(ranks, family, layout, stage, precision):
    planned = Layout(**LAYOUTS[layout])
    with torch.device("meta"):
        shapes = shapes_of(build(family))
    split = partial(split_dimension, kv_heads=KV_HEADS[family], ranks=planned.tp)
    expected = by_rank(shapes, planned, Training(stage=stage, precision=precision), split=split)
    for held, plan in zip(ranks(4, measured, family, LAYOUTS[layout], stage, precision), expected, strict=True):
        assert held == pytest.approx((plan.parameters, plan.gradients, plan.optimizer), rel=0.02)
