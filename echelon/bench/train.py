"""What every rank of `echelon bench train` does: train on fixed, synthetic data, and tell how much of it a second.

First one rank trains alone while the others sleep, then all train together, so that the efficiency compares what was
measured in one run; a rank has its share of the cores in both. A batch is a rank's own, whatever the layout: ranks of
`tp` and `cp`, who share samples, share so many more of them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.bench import engine
from echelon.bench.train_options import TrainOptions
from echelon.bench.train_report import Result, heading
from echelon.comm.torch_compat import choose_gpu
from echelon.models import presets
from echelon.parallel import batch, sequence
from echelon.parallel.apply import DTYPES, parallelize
from echelon.parallel.layout import Grid
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.recompute import blocks

_NAP = 0.02  # seconds
Step = Callable[[], float]
Say = Callable[[str], None]


def main(options: TrainOptions) -> None:
    """Measure, print and write, on this rank."""
    world = engine.join(("mpi",))
    options.check(world.ranks)
    if options.device_type == "cuda":
        choose_gpu()
        torch.backends.cudnn.benchmark = True  # as in the original: shapes are always the same
    say: Say = partial(print, flush=True) if world.rank == 0 else _say_nothing
    for line in heading(options, world.ranks):
        say(line)
    alone = _alone(options, world, say) if world.ranks > 1 else None
    step = prepared(options, options.layout.build(options.device_type))
    rates = measured(step, options, say, lambda seconds: float(world.gather([seconds]).max()))
    result = Result(options, world.ranks, rates, alone)
    for line in result.lines():
        say(line)
    if world.rank == 0 and options.json:
        result.write(Path(options.json), engine.machine(world))
    dist.destroy_process_group()


def prepared(options: TrainOptions, grid: Grid | None) -> Step:
    """One batch of training, ready to be called: over the ranks of a grid, or by this one alone. It returns the norm of
    the gradients.
    """
    strategies = options.strategies
    model: Any = presets.build(options.config).to(options.device_type)
    given = synthetic(options, grid)
    if grid is None:
        model = model.to(DTYPES[strategies.precision])
        for block in blocks(model) if strategies.compile else []:
            block.compile()
    else:
        model = parallelize(model, grid, strategies)
    optimizer = Optimizer(partial(torch.optim.SGD, lr=0.01), model)
    [targets] = [tensor for name, tensor in given.items() if name.startswith("targets")]
    count: Any = targets.numel() if grid is None else batch.count(targets, grid.mesh("data"))

    def step() -> float:
        optimizer.scale(model(**given) / count).backward()
        return optimizer.step()

    return step


def synthetic(options: TrainOptions, grid: Grid | None) -> dict[str, Tensor]:
    """This rank's samples: the arguments of the model, by their names."""
    torch.manual_seed(0 if grid is None else grid.mesh("dp").get_local_rank())
    samples = options.batch_size * (1 if grid is None else options.tp * options.cp)
    config: Any = options.config
    if options.takes_images:
        images = torch.randn(samples, config.channels, options.image_size, options.image_size)
        made = {"images_BCHW": images.to(DTYPES[options.strategies.precision])}
        if presets.segments(config):
            made["targets_BHW"] = torch.randint(config.classes, (samples, *images.shape[-2:]))
        else:
            made["targets_B"] = torch.randint(config.classes, (samples,))
    else:
        shape = samples, options.sequence_length
        made = {name: torch.randint(config.vocabulary, shape) for name in ("tokens_BS", "targets_BS")}
    if grid is not None and options.cp > 1:
        kind = options.strategies.sequence
        parts = sequence.part(*made.values(), mesh=grid.mesh("cp"), kind=kind, causal=options.is_causal)
        made = dict(zip([*made, "positions_S"], parts, strict=True))
    return {name: tensor.to(options.device_type) for name, tensor in made.items()}


def measured(step: Step, options: TrainOptions, say: Say, slowest: Callable[[float], float] = float) -> list[float]:
    """Images or tokens a second of one rank, for each iteration; `slowest` is given a rank's time and returns all's."""
    say("Running warmup...")
    for _ in range(options.warmup_batches):
        step()
    say("Running benchmark...")
    rates = []
    for number in range(options.iterations):
        start, norm = _time(options), 0.0
        for _ in range(options.batches):
            norm = step()
        rates.append(options.batches * options.units_in_a_batch / slowest(_time(options) - start))
        say(f"Iter #{number}: {rates[-1]:.1f} {options.unit}/sec per {options.place}")
        if not math.isfinite(norm):
            raise RuntimeError("the gradients are no numbers, so updates are skipped: this is no training to measure")
    return rates


def _alone(options: TrainOptions, world: engine.World, say: Say) -> list[float] | None:
    """What the first rank does by itself. The others sleep: in a barrier that waits they would take cores from it."""
    rates = None
    if world.rank == 0:
        say(f"Running one {options.place} alone...")
        try:
            rates = measured(prepared(options, None), options, _say_nothing)
        except torch.OutOfMemoryError:
            say(f"One {options.place} alone: out of memory, so there is no efficiency to tell")
    over = world.control.Ibarrier()
    while not over.Test():
        time.sleep(_NAP)
    return rates


def _say_nothing(_line: str) -> None:
    pass


def _time(options: TrainOptions) -> float:
    if options.device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main(TrainOptions.from_text(sys.argv[1]))
