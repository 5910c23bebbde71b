"""The matrix: every family of models × every layout, trained for a few steps beside the same model on one process.

A row is plain data. `train` is what each rank runs: it compares the loss and every whole gradient of every step with
those of one process, which it computes itself, and returns the largest relative errors and what was communicated.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.models.bert import Bert, BertConfig
from echelon.models.gpt import GPT, GPTConfig
from echelon.models.llama import Llama, LlamaConfig
from echelon.models.resnet import ResNet, ResNetConfig
from echelon.models.vit import ViT, ViTConfig
from echelon.parallel import batch as batches
from echelon.parallel import data
from echelon.parallel.apply import Strategies, parallelize
from echelon.parallel.layout import Grid, Layout
from echelon.parallel.optimizer import Optimizer
from tests.groups import keep_groups

STEPS = 5
LENGTH, VOCABULARY = 16, 61
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}


@dataclass(frozen=True)
class Row:
    """A layout by its degrees, and how its dimensions are used."""

    name: str
    degrees: tuple[tuple[str, int], ...]
    strategies: Strategies

    @property
    def layout(self) -> Layout:
        return Layout(**dict(self.degrees))

    @property
    def batch(self) -> int:
        """Samples of the global batch: four, or two for each of dp."""
        return 4 if 4 % self.layout.dp == 0 else 2 * self.layout.dp


def row(name: str, stage: int = 0, sequence: str = "ring", **degrees: int) -> Row:
    strategies = Strategies(stage=stage, sequence=sequence, precision="fp64", global_batchnorm=True)  # type: ignore[arg-type]
    return Row(name, tuple(degrees.items()), strategies)


DATA = [
    row("replicate", dp=2),
    row("shard 1", 1, dp=2),
    row("shard 2", 2, dp=2),
    row("shard 3", 3, dp=2),
    row("hybrid shard", 3, dp=4, replicate=2),
]
TENSOR = [row("tp", tp=2), row("dp × tp", dp=2, tp=2)]
SEQUENCE = [
    row("ulysses", cp=2, sequence="ulysses"),
    row("ring", cp=2),
    row("dp × ulysses", dp=2, cp=2, sequence="ulysses"),
    row("dp × ring", dp=2, cp=2),
]
COMBINED = [
    row("shard 3 × tp", 3, dp=2, tp=2),
    row("shard 3 × tp × ring", 3, dp=2, tp=2, cp=2),
    row("shard 3 × tp × ulysses", 3, dp=2, tp=2, cp=2, sequence="ulysses"),
    row("hybrid shard × tp", 3, dp=4, replicate=2, tp=2),
]
TRANSFORMER = [*DATA, *TENSOR, *SEQUENCE, *COMBINED]
ROWS = {
    "gpt": TRANSFORMER,
    "llama": [*TRANSFORMER, row("tp over more ranks than kv heads", tp=4)],
    "bert": TRANSFORMER,
    "vit": [*DATA, *TENSOR, row("shard 3 × tp", 3, dp=2, tp=2)],
    "resnet": DATA,
}


def wider() -> list[Row]:
    """Every layout of dp, tp and cp on 2 to 8 ranks in every stage, as far as 4 heads and 16 tokens can be split."""
    rows = []
    for dp, tp, cp in itertools.product(range(1, 9), (1, 2, 4), (1, 2, 4)):
        if not 2 <= dp * tp * cp <= 8 or LENGTH % (2 * cp * tp):
            continue
        for stage, kind in itertools.product(range(4), ("ring", "ulysses") if cp > 1 else ("ring",)):
            if kind == "ring" or 4 % (tp * cp) == 0:
                name = f"dp {dp} × tp {tp} × {kind} {cp}, stage {stage}"
                rows.append(row(name, stage, kind, dp=dp, tp=tp, cp=cp))
    return rows


def build(family: str) -> nn.Module:
    if family == "gpt":
        return GPT(GPTConfig(vocabulary=VOCABULARY, context=LENGTH, dim=32, layers=2, heads=4, dropout=0.1))
    if family == "bert":
        return Bert(BertConfig(vocabulary=VOCABULARY, context=LENGTH, dim=32, layers=2, heads=4, dropout=0.1))
    if family == "vit":
        return ViT(ViTConfig(classes=10, image=16, patch=4, dim=32, layers=2, heads=4, dropout=0.1))
    if family == "resnet":
        return ResNet(ResNetConfig(classes=10, stem_dim=8, dims=(16, 32), depths=(1, 2)))
    config = LlamaConfig(vocabulary=VOCABULARY, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48, qk_norm=True)
    return Llama(config)


def global_batch(family: str, step: int, device: str, dtype: torch.dtype, batch: int = 4) -> dict[str, Tensor]:
    """The same numbers whatever the device and dtype."""
    made = _global_batch(family, torch.Generator().manual_seed(step), batch)
    return {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in made.items()}


def _global_batch(family: str, generator: torch.Generator, batch: int) -> dict[str, Tensor]:
    if family in ("vit", "resnet"):
        images = torch.randn(batch, 3, 16, 16, generator=generator)
        return {"images_BCHW": images, "targets_B": torch.randint(10, (batch,), generator=generator)}
    tokens = torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=generator)
    if family != "bert":
        return {"tokens_BS": tokens[:, :-1], "targets_BS": tokens[:, 1:]}
    masked = torch.rand(batch, LENGTH, generator=generator) < 0.2
    return {"tokens_BS": tokens[:, 1:].where(~masked, 0), "targets_BS": tokens[:, 1:].where(masked, -100)}


def seed(step: int, optimizer: str) -> int:
    """Of a step's batch. AdamW sees one batch again and again, so that a loss that does not fall is seen."""
    return 0 if optimizer == "adamw" else step


def targets(batch: dict[str, Tensor]) -> Tensor:
    return next(tensor for name, tensor in batch.items() if name.startswith("targets"))


@cache
def alone(
    family: str, precision: str, optimizer: str, device: str, samples: int = 4
) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of every step on one process: in fp32 also for what is then trained in less."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model: Any = build(family).to(device, dtype)
    optimize = OPTIMIZERS[optimizer](model.parameters())
    told = []
    for step in range(STEPS):
        model.place.step = step
        batch = global_batch(family, seed(step, optimizer), device, dtype, samples)
        loss = model(**batch) / (targets(batch) != -100).sum()
        loss.backward()
        told.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        optimize.step()
        optimize.zero_grad()
    return told


@cache
def grid_of(layout: Layout, device: str) -> Grid:
    grid = layout.build(device)
    keep_groups()
    return grid


def train(
    family: str, row: Row, precision: str = "fp64", optimizer: str = "sgd", device: str = "cpu"
) -> dict[str, Any]:
    reference = alone(family, precision, optimizer, device, row.batch)
    grid = grid_of(row.layout, device)
    strategies = replace(row.strategies, precision=precision)
    model: Any = parallelize(build(family).to(device), grid, strategies)
    update = Optimizer(OPTIMIZERS[optimizer], model)
    worst_loss = worst_gradient = worst_norm = 0.0
    where = ""
    sent: dict[tuple[str, str], int] = defaultdict(int)
    for step, (loss_alone, gradients_alone) in enumerate(reference):
        model.place.step = step
        whole = global_batch(family, seed(step, optimizer), device, next(model.parameters()).dtype, row.batch)
        given = batches.part(whole, grid, kind=strategies.sequence, causal=family != "bert")
        with echelon.comm.record() as forward_and_backward:
            loss = model(**given) / batches.count(targets(given), grid.mesh("data"))
            loss.backward()
        gradients = data.full_gradients(model)
        with echelon.comm.record() as updating:
            norm = update.step()
        total = loss.detach().double()
        dist.all_reduce(total, group=grid.mesh("data").get_group())
        worst_loss = worse(worst_loss, abs(total.item() / loss_alone - 1))
        norm_alone = torch.stack([gradient.double().norm() for gradient in gradients_alone.values()]).norm().item()
        worst_norm = worse(worst_norm, abs(norm / norm_alone - 1))
        assert gradients.keys() == gradients_alone.keys()
        for name, gradient in gradients_alone.items():
            error = ((gradients[name] - gradient).norm() / gradient.norm()).item()
            if not error <= worst_gradient:  # nor if it is no number
                worst_gradient, where = worse(worst_gradient, error), f"{name} in step {step}"
        if step == STEPS - 1:
            for record in [*forward_and_backward, *updating]:
                sent[record.dimension, record.operation] += record.payload
    traffic = {key: payload for key, payload in sent.items() if payload}
    errors = {"loss": worst_loss, "gradient": worst_gradient, "norm": worst_norm}
    return errors | {"where": where, "traffic": traffic}


def worse(one: float, other: float) -> float:
    """What is no number is worst of all."""
    return math.inf if math.isnan(other) else max(one, other)
