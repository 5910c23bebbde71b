"""How ranks train models of images over tiles, layers, pipelines and both directions, and how far from one process."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.models.amoebanet import AmoebaNet, AmoebaNetConfig
from echelon.models.resnet import ResNet, ResNetConfig
from echelon.models.unet import UNet, UNetConfig
from echelon.parallel import batch as batches
from echelon.parallel import data
from echelon.parallel.apply import Strategies, parallelize, pipeline
from echelon.parallel.layout import Layout, Stage
from echelon.parallel.optimizer import Optimizer
from tests.parallel.matrix import worse
from tests.parallel.pipeline.training import by_operation

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


def strategies_of(schedule: str) -> Strategies:
    chunks = 2 if schedule == "interleaved" else 1
    return Strategies(precision="fp64", global_batchnorm=True, schedule=schedule, chunks=chunks)


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


class Kept:
    """In here forward passes are watched: the most bytes that are kept for backward passes, at any one time. What a
    model holds anyway is not counted, and a piece of memory once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        self._times: Counter[int] = Counter()
        self.now = self.most = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(partial(_Saved, self), lambda saved: saved.tensor)

    def add(self, storage: torch.UntypedStorage, times: int) -> None:
        place = storage.data_ptr()
        if place in self._own:
            return
        before = self._times[place]
        self._times[place] += times
        self.now += storage.nbytes() * (bool(self._times[place]) - bool(before))
        self.most = max(self.most, self.now)


class _Saved:
    """A tensor that a graph keeps."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.tensor, self._kept = tensor, kept
        kept.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._kept.add(self.tensor.untyped_storage(), -1)


def train(family: str, name: str) -> dict[str, Any]:
    """A rank's largest relative errors, the names of what it holds, what it sent in the last step (of several passes
    without a pipeline: from the last on), and the most bytes that it kept in it for backward passes.
    """
    degrees, schedule, microbatches = (COMBINATIONS | MORE)[name]
    layout = Layout(**degrees)
    samples = SAMPLES * layout.dp
    reference, ended = alone(family, microbatches, samples)
    strategies, grid = strategies_of(schedule), layout.build()
    model: Any = parallelize(build(family).double(), grid, strategies)
    optimizer = Optimizer(SGD, model)
    pipe = pipeline(model, grid, strategies, microbatches) if layout.depth > 1 else None
    worst: dict[str, float] = defaultdict(float)
    sent: dict[tuple[str, str], int] = {}
    kept = Kept(model)
    for step, (loss_alone, gradients_alone) in enumerate(reference):
        whole = [microbatch(family, step, number, samples) for number in range(microbatches)]
        given = [batches.part(each, grid, first=number * samples) for number, each in enumerate(whole)]
        given = [{key: x.clone() for key, x in each.items()} for each in given]  # no slices: what is kept is counted
        count = counted(family, step, microbatches, samples)
        targets = torch.cat([each for mine in given for key, each in mine.items() if key.startswith("targets")])
        kept = Kept(model)
        with echelon.comm.record() as counting:
            tiles = math.prod(layout.grids[grid.stage].tiles)
            assert batches.count(targets, grid.mesh("data")) == count * tiles  # as a training run counts them
        with kept.hooks:
            records, losses = _run(model, pipe, given, count)
        told = torch.tensor(sum(each.item() for each in losses if each is not None), dtype=torch.float64)
        dist.all_reduce(told)
        rows, columns = layout.grids[-1].tiles
        worst["loss"] = worse(worst["loss"], abs(told.item() / (rows * columns) / loss_alone - 1))
        for parameter, gradient in data.full_gradients(model).items():
            expected = gradients_alone[parameter]
            worst["gradient"] = worse(worst["gradient"], ((gradient - expected).norm() / expected.norm()).item())
        norm_alone = torch.stack([each.norm() for each in gradients_alone.values()]).norm().item()
        with echelon.comm.record() as updating:
            worst["norm"] = worse(worst["norm"], abs(optimizer.step() / norm_alone - 1))
        sent = by_operation([*counting, *records, *updating])
    for tensor, held in [*model.named_buffers(), *model.named_parameters()]:
        worst["state"] = worse(worst["state"], (held.detach().double() - ended[tensor].double()).abs().max().item())
    holds = sorted(dict(model.named_parameters()))
    return {"errors": dict(worst), "holds": holds, "traffic": sent, "kept": kept.most}


def _divided(count: int, out: Tensor, _: int) -> Tensor:
    return out / count


def _run(model: Any, pipe: Any, given: list[dict[str, Tensor]], count: int) -> tuple[list[Any], list[Any]]:
    """What was communicated, and the losses."""
    if pipe is not None:
        with echelon.comm.record() as records:
            return records, pipe.run(given, partial(_divided, count))
    losses = []
    for number, each in enumerate(given):
        is_last = number + 1 == len(given)
        with contextlib.nullcontext() if is_last else data.accumulate(model), echelon.comm.record() as records:
            loss = model(**each) / count
            loss.backward()
        losses.append(loss.detach())
    return records, losses
