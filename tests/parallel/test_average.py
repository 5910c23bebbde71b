"""Local SGD: averaged after every step it is synchronous training; averaged less often, ranks agree after each time."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.comm.torch_compat import local_tensor
from echelon.parallel import batch as batches
from echelon.parallel import data
from echelon.parallel.apply import Strategies, parallelize, summed_over
from echelon.parallel.average import average
from echelon.parallel.layout import Grid, Layout
from echelon.parallel.optimizer import Optimizer
from echelon.plan import traffic as plan
from tests.parallel.matrix import LENGTH, build, global_batch, grid_of, targets
from tests.parallel.nets import error

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
}
LAYOUTS = [Layout(dp=2), Layout(dp=4), Layout(dp=2, tp=2), Layout(dp=2, cp=2), Layout(dp=2, tp=2, cp=2)]


class Run:
    """A model in training, a step at a time."""

    def __init__(self, layout: Layout, strategies: Strategies, optimizer: str = "sgd", family: str = "gpt") -> None:
        self.grid: Grid = grid_of(layout, "cpu")
        self.strategies, self.family = strategies, family
        self.model: Any = parallelize(build(family), self.grid, strategies)
        self.optimizer = Optimizer(OPTIMIZERS[optimizer], self.model)
        self.samples = 2 * layout.dp

    def mine(self, number: int) -> dict[str, Tensor]:
        dtype = next(self.model.parameters()).dtype
        return batches.part(global_batch(self.family, number, "cpu", dtype, self.samples), self.grid)

    def step(self, number: int, factor: float = 1.0) -> tuple[float, float]:
        """The loss, and the norm of the gradients."""
        self.model.place.step = number
        given, summed = self.mine(number), summed_over(self.grid, self.strategies)
        loss = self.model(**given) / batches.count(targets(given), summed)
        (self.optimizer.scale(loss) * factor).backward()
        norm = self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=summed.get_group())
        return total.item(), norm

    def average(self) -> None:
        average(self.model, self.optimizer, self.grid.mesh("dp"))

    def apart(self) -> float:
        """How far the ranks of dp are from each other, in what they hold and what their optimizers keep."""
        held = [local_tensor(parameter) for parameter in self.model.parameters()]
        held += [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        held += [tensor for tensors in self.optimizer.kept().values() for tensor in tensors]
        flat = torch.cat([tensor.detach().double().flatten() for tensor in held])
        largest, smallest = flat.clone(), flat.clone()
        group = self.grid.mesh("dp").get_group()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
        return (largest - smallest).max().item()


def beside_synchronous(layout: Layout) -> tuple[float, float]:
    """Largest relative errors of the loss, as a mean over dp, and of the parameters, in five steps."""
    synchronous = Run(layout, Strategies(precision="fp64"))
    local = Run(layout, Strategies(precision="fp64", average_every=1))
    worst = 0.0
    for number in range(5):
        expected, _ = synchronous.step(number)
        mean = torch.tensor(local.step(number)[0] / layout.dp, dtype=torch.float64)
        local.average()
        dist.all_reduce(mean, group=local.grid.mesh("dp").get_group())
        worst = max(worst, error(mean, expected))
    return worst, error(data.full_parameters(local.model), data.full_parameters(synchronous.model))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_an_average_after_every_step_is_synchronous_training(ranks, layout):
    for loss, parameters in ranks(layout.size, beside_synchronous, layout):
        assert loss <= 1e-12
        assert parameters <= 1e-12


def distances(layout: Layout, family: str, precision: str, optimizer: str) -> list[float]:
    run = Run(layout, Strategies(precision=precision, average_every=2), optimizer, family)  # type: ignore[arg-type]
    found = [run.apart()]
    for number in range(4):
        run.step(number)
        found.append(run.apart())
        if number % 2:
            run.average()
            found.append(run.apart())
    return found


@pytest.mark.parametrize(
    ("layout", "family", "precision", "optimizer"),
    [
        (Layout(dp=4), "gpt", "fp32", "adamw"),
        (Layout(dp=2, tp=2), "gpt", "bf16", "adamw"),
        (Layout(dp=2, tp=2), "llama", "fp32", "sgd with momentum"),
        (Layout(dp=4), "resnet", "fp32", "sgd"),
    ],
)
def test_ranks_hold_the_same_after_an_average_and_differ_before(ranks, layout, family, precision, optimizer):
    for start, *found in ranks(4, distances, layout, family, precision, optimizer):
        one, two, averaged, three, four, averaged_again = found
        assert start == averaged == averaged_again == 0
        assert min(one, two, three, four) > 0


def different_starts() -> float:
    grid = grid_of(Layout(dp=2, cp=2), "cpu")
    model = build("gpt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    model = parallelize(model, grid, Strategies(average_every=2))
    return error(data.full_parameters(model), data.full_parameters(build("gpt")))


def test_all_start_from_the_first_rank(ranks):
    assert ranks(4, different_starts) == [0.0] * 4


def losses(average_every: int) -> list[float]:
    run = Run(Layout(dp=4), Strategies(average_every=average_every), "adamw")
    found = []
    for number in range(12):
        found.append(run.step(0)[0])
        if (number + 1) % average_every == 0:
            run.average()
    return found


def test_the_loss_falls_with_an_average_in_four_steps(ranks):
    for found in ranks(4, losses, 4):
        assert found[4] < 0.95 * found[0]
        assert found[8] < 0.95 * found[4]
        assert found[11] < 0.95 * found[8]


def norms(layout: Layout) -> float:
    """The relative error of the norm beside that of one process with the samples of this rank of dp."""
    run = Run(layout, Strategies(precision="fp64", average_every=3))
    _, found = run.step(0)
    alone: Any = build("gpt").double()
    place, each = run.grid.mesh("dp").get_local_rank(), run.samples // layout.dp
    whole = global_batch("gpt", 0, "cpu", torch.float64, run.samples)
    numbers = torch.arange(place * each, (place + 1) * each)
    given = {name: tensor[numbers] for name, tensor in whole.items()}
    (alone(**given, samples_B=numbers) / targets(given).numel()).backward()
    return error(found, nn.utils.get_total_norm(parameter.grad for parameter in alone.parameters()))


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, tp=2), Layout(dp=2, tp=2, cp=2)], ids=repr)
def test_a_rank_of_dp_clips_by_its_own_norm(ranks, layout):
    assert max(ranks(layout.size, norms, layout)) <= 1e-12


def recorded(layout: Layout, family: str, precision: str, optimizer: str) -> tuple[Counter, Counter]:
    """Payload by dimension and operation, of a step and of an averaging."""
    strategies = Strategies(precision=precision, global_batchnorm=True, average_every=2)  # type: ignore[arg-type]
    run = Run(layout, strategies, optimizer, family)
    sent: tuple[Counter, Counter] = Counter(), Counter()
    run.step(0)
    given = run.mine(1)
    with echelon.comm.record() as step:
        loss = run.model(**given) / batches.count(targets(given), summed_over(run.grid, strategies))
        run.optimizer.scale(loss).backward()
        run.optimizer.step()
    with echelon.comm.record() as averaging:
        run.average()
    for counter, log in zip(sent, (step, averaging)):
        for record in log:
            counter[record.dimension, record.operation] += record.payload
    return +sent[0], +sent[1]


@pytest.mark.parametrize(
    ("layout", "family", "precision", "optimizer"),
    [
        *((layout, "gpt", "fp32", "adamw") for layout in LAYOUTS),
        (Layout(dp=2, tp=2), "llama", "bf16", "adamw"),
        (Layout(dp=2), "gpt", "fp64", "sgd with momentum"),
        (Layout(dp=2), "bert", "fp32", "sgd"),
        (Layout(dp=2), "resnet", "bf16", "sgd with momentum"),
    ],
)
def test_bytes(ranks, layout, family, precision, optimizer):
    with torch.device("meta"):
        model = build(family)
    strategies = Strategies(precision=precision, global_batchnorm=True, average_every=2)
    length = LENGTH if family != "resnet" else 1
    for rank, (step, averaging) in enumerate(ranks(layout.size, recorded, layout, family, precision, optimizer)):
        assert step == plan.traffic(model, layout, strategies, 2 * layout.dp, length, rank)
        assert averaging == plan.averaging(model, layout, strategies, optimizer, rank)


def a_first_step_skipped() -> tuple[bool, list[str], float]:
    """One rank's first gradients are no numbers: it has no state to average yet."""
    run = Run(Layout(dp=2), Strategies(average_every=1), "adamw")
    _, norm = run.step(0, math.nan if dist.get_rank() else 1.0)
    run.average()
    kept = list(run.optimizer.kept())
    run.step(1)
    run.average()
    return math.isfinite(norm), kept, run.apart()


def test_a_rank_without_state_yet(ranks):
    one, other = ranks(2, a_first_step_skipped)
    assert one == (True, ["", "exp_avg", "exp_avg_sq"], 0.0)
    assert other == (False, [""], 0.0)


def test_refusals():
    with pytest.raises(ValueError, match=r"average_every=4 with stage=2: .* use stage=0"):
        Strategies(average_every=4, stage=2)
    with pytest.raises(ValueError, match="average_every=-1: it counts steps"):
        Strategies(average_every=-1)
