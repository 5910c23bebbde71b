"""How ranks train models of images over tiles, layers, pipelines and both directions, and how far from one process."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.models.amoebanet import AmoebaNet, AmoebaNetConfig
from echelon.models.resnet import ResNet, ResNetConfig
from echelon.models.unet import UNet, UNetConfig
from echelon.parallel import batch as batches
from echelon.parallel import data
from echelon.parallel.apply import Strategies, parallelize, pipeline
from echelon.parallel.layout import Layout, Stage
from echelon.parallel.optimizer import Optimizer
from tests.parallel.matrix import worse

STEPS, SAMPLES = 5, 2  # samples of a microbatch, for each of dp
HEIGHT, WIDTH = 53, 43  # on less, AmoebaNet's last norms see so few pixels that rounding grows to errors
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
TILES = {"stages": (Stage(sp=3), Stage())}
COMBINATIONS: dict[str, tuple[dict[str, Any], str, int]] = {  # degrees, schedule, microbatches
    "SP": ({"sp": (2, 2)}, "1f1b", 2),
    "SP × dp": ({"sp": (1, 2), "dp": 2}, "1f1b", 2),
    "LP": ({"pp": 2}, "gpipe", 1),
    "PP": ({"pp": 2}, "1f1b", 4),
    "SP+LP": (TILES, "gpipe", 1),
    "SP+PP": (TILES, "1f1b", 4),
    "GEMS+LP": ({"pp": 2}, "gems", 2),
    "GEMS+PP": ({"pp": 2}, "gems-gpipe", 4),
    "SP+GEMS+LP": (TILES, "gems", 2),
    "SP+GEMS+PP": (TILES, "gems-gpipe", 4),
}
MORE: dict[str, tuple[dict[str, Any], str, int]] = {
    "LP × dp": ({"pp": 2, "dp": 2}, "gpipe", 1),
    "PP × dp": ({"pp": 2, "dp": 2}, "1f1b", 4),
    "SP+LP × dp": ({"stages": (Stage(sp=2), Stage()), "dp": 2}, "gpipe", 1),
    "SP+PP × dp": ({"stages": (Stage(sp=2), Stage()), "dp": 2}, "1f1b", 4),
    "GEMS+LP × dp": ({"pp": 2, "dp": 2}, "gems", 2),
    "GEMS+PP × dp": ({"pp": 2, "dp": 2}, "gems-gpipe", 4),
    "SP+GEMS+LP × dp": ({"stages": (Stage(sp=2), Stage()), "dp": 2}, "gems", 2),
    "SP+GEMS+PP × dp": ({"stages": (Stage(sp=2), Stage()), "dp": 2}, "gems-gpipe", 4),
    "tiles in every stage": ({"sp": 2, "pp": 2}, "1f1b", 4),
    "tiles in every stage, interleaved": ({"sp": 2, "pp": 2}, "interleaved", 4),
    "ever fewer tiles, interleaved": ({"stages": (Stage(sp=3), Stage())}, "interleaved", 4),
    "tiles in every stage, both ways": ({"sp": 2, "pp": 2}, "gems", 4),
    "ever fewer tiles": ({"stages": (Stage(sp=(2, 2)), Stage(sp=2), Stage())}, "1f1b", 4),
    "ever fewer tiles, both ways": ({"stages": (Stage(sp=3), Stage(sp=(1, 2)), Stage())}, "gems-gpipe", 4),
    "ever more tiles": ({"stages": (Stage(), Stage(sp=3))}, "1f1b", 4),
    "three stages, both ways": ({"pp": 3}, "gems", 4),
}


def build(family: str) -> Any:
    if family == "amoebanet":
        return AmoebaNet(AmoebaNetConfig(classes=5, layers=3, filters=16))
    if family == "unet":
        return UNet(UNetConfig(classes=4, dim=4, depth=2))
    return ResNet(ResNetConfig(classes=5, stem_dim=8, dims=(8, 16), depths=(2, 2)))


def microbatch(family: str, step: int, number: int, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    images = torch.randn(samples, 3, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
    numbers = {"samples_B": torch.arange(number * samples, (number + 1) * samples)}
    if family == "unet":
        targets = torch.randint(-1, 4, (samples, HEIGHT, WIDTH), generator=generator)
        return {"images_BCHW": images, "targets_BHW": targets.where(targets >= 0, -100)} | numbers
    return {"images_BCHW": images, "targets_B": torch.randint(5, (samples,), generator=generator)} | numbers


def counted(family: str, step: int, microbatches: int, samples: int) -> int:
    """The targets of a step."""
    made = [microbatch(family, step, number, samples) for number in range(microbatches)]
    return sum(int((x != -100).sum()) for each in made for name, x in each.items() if name.startswith("targets"))


@cache
def alone(family: str, microbatches: int, samples: int) -> tuple[list[tuple[float, dict[str, Tensor]]], dict[str, Any]]:
    """Of every step the loss and all gradients; at the end all that the model holds."""
    model = build(family).double()
    optimizer = SGD(model.parameters())
    told = []
    for step in range(STEPS):
        total = 0.0
        for number in range(microbatches):
            loss = model(**microbatch(family, step, number, samples)) / counted(family, step, microbatches, samples)
            loss.backward()
            total += loss.item()
        told.append((total, {name: each.grad.clone() for name, each in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return told, {name: each.clone() for name, each in model.state_dict().items()}


def train(family: str, name: str) -> dict[str, Any]:
    """A rank's largest relative errors, and the names of what it holds."""
    degrees, schedule, microbatches = (COMBINATIONS | MORE)[name]
    layout = Layout(**degrees)
    samples = SAMPLES * layout.dp
    reference, ended = alone(family, microbatches, samples)
    chunks = 2 if schedule == "interleaved" else 1
    strategies = Strategies(precision="fp64", global_batchnorm=True, schedule=schedule, chunks=chunks)
    grid = layout.build()
    model: Any = parallelize(build(family).double(), grid, strategies)
    optimizer = Optimizer(SGD, model)
    pipe = pipeline(model, grid, strategies, microbatches) if layout.depth > 1 else None
    worst: dict[str, float] = defaultdict(float)
    for step, (loss_alone, gradients_alone) in enumerate(reference):
        whole = [microbatch(family, step, number, samples) for number in range(microbatches)]
        given = [batches.part(each, grid, first=number * samples) for number, each in enumerate(whole)]
        count = counted(family, step, microbatches, samples)
        losses = _passes(model, given, count) if pipe is None else pipe.run(given, partial(_divided, count))
        told = torch.tensor(sum(each.item() for each in losses if each is not None), dtype=torch.float64)
        dist.all_reduce(told)
        rows, columns = layout.grids[-1].tiles
        worst["loss"] = worse(worst["loss"], abs(told.item() / (rows * columns) / loss_alone - 1))
        for parameter, gradient in data.full_gradients(model).items():
            expected = gradients_alone[parameter]
            worst["gradient"] = worse(worst["gradient"], ((gradient - expected).norm() / expected.norm()).item())
        norm_alone = torch.stack([each.norm() for each in gradients_alone.values()]).norm().item()
        worst["norm"] = worse(worst["norm"], abs(optimizer.step() / norm_alone - 1))
    for tensor, held in [*model.named_buffers(), *model.named_parameters()]:
        worst["state"] = worse(worst["state"], (held.detach().double() - ended[tensor].double()).abs().max().item())
    return {"errors": dict(worst), "holds": sorted(dict(model.named_parameters()))}


def _divided(count: int, out: Tensor, _: int) -> Tensor:
    return out / count


def _passes(model: Any, given: list[dict[str, Tensor]], count: int) -> list[Tensor]:
    losses = []
    for number, each in enumerate(given):
        with data.accumulate(model) if number + 1 < len(given) else contextlib.nullcontext():
            loss = model(**each) / count
            loss.backward()
        losses.append(loss.detach())
    return losses
