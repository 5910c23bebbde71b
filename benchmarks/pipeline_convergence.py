"""What old weights cost in accuracy: `echelon run -n 2 benchmarks/pipeline_convergence.py`.

A small GPT learns the bytes of Python's own standard library on ranks of a pipeline: by 1f1b, whose gradients are those
of one process, by PipeDream, and by PipeDream-2BW. Update for update all take the same samples at the same learning
rate, from the same first values, without clipping, and differ only in how old the weights are that gradients are made
with. The versioned ones run in windows of many updates; between them the loss on files that none has seen is taken.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from local_sgd import LENGTH, samples, text
from rich.console import Console
from rich.table import Table
from torch import Tensor

from echelon import models
from echelon.parallel.apply import Strategies, parallelize, pipeline
from echelon.parallel.layout import Grid, Layout
from echelon.parallel.pipeline.run import Pipeline
from echelon.train.config import Optimizer, Schedule
from echelon.train.optimizer import make_optimizer
from echelon.train.schedule import learning_rate

SCHEDULES = {"1f1b": "#1a1a1a", "pipedream": "#d95f02", "pipedream-2bw": "#1f78b4"}
WINDOW, SAMPLES, EVALUATED = 40, 8, 64  # updates between evaluations; samples of an update
SIZES = {"vocabulary": 256, "context": LENGTH, "dim": 128, "layers": 4, "heads": 4, "tied": False}
OPTIMIZER, SCHEDULE = Optimizer(lr=1e-3), Schedule(warmup=32)
SMOOTHED = 10  # updates of which the training loss that is drawn is the mean

Losses = list[tuple[int, float]]  # after so many updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200, help=f"a multiple of {WINDOW} (default: 200)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--plot", type=Path, help="where to draw the losses")
    arguments = parser.parse_args()
    if arguments.updates < WINDOW or arguments.updates % WINDOW:
        parser.error(f"--updates {arguments.updates}: take a multiple of {WINDOW}")
    dist.init_process_group("echelon")
    grid = Layout(pp=-1).build()
    read, held_out = text()
    rows = {}
    for name in SCHEDULES:
        rows[name] = trained(grid, name, arguments.updates, read, held_out)
        if dist.get_rank() == 0:
            print(f"{name}: {rows[name]['held_out'][-1][1]:.4f}", flush=True)
    if dist.get_rank() == 0:
        about = {"what": __doc__.splitlines()[0], "torch": torch.__version__, "cores": os.cpu_count()}
        about |= {"ranks": grid.layout.pp, "updates": arguments.updates, "window": WINDOW, "samples": SAMPLES} | SIZES
        print_table(rows, grid.layout.pp, arguments.updates)
        if arguments.json:
            arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        if arguments.plot:
            plot(rows, grid.layout.pp, arguments.plot)
    dist.destroy_process_group()


def trained(grid: Grid, name: str, updates: int, read: Tensor, held_out: Tensor) -> dict[str, Losses]:
    """The losses of a model while it learns. PipeDream updates with every microbatch, so its are whole batches."""
    parts = 1 if name == "pipedream" else grid.layout.pp  # microbatches of an update
    window = 1 if name == "1f1b" else WINDOW  # updates of a run
    strategies = Strategies(schedule=name)
    model: Any = parallelize(models.build("gpt2", **SIZES), grid, strategies)
    optimizer = make_optimizer(model, OPTIMIZER)
    rates = (learning_rate(step, updates, OPTIMIZER.lr, SCHEDULE) for step in range(updates))
    optimizer.inner.register_step_pre_hook(lambda inner, *_: set_rate(inner, rates))
    pipe = pipeline(model, grid, strategies, parts * window)
    ahead = pipeline(model, grid, Strategies(), grid.layout.pp)  # the same model, for forward passes alone
    learned: Losses = []
    told: Losses = [(0, evaluated(ahead, held_out))]
    for first in range(0, updates, window):
        given = [each for step in range(first, first + window) for each in cut(samples(read, SAMPLES, step), parts)]
        losses = pipe.run(given, lambda out, _: out / (SAMPLES * LENGTH), optimizer)
        if window == 1:
            optimizer.step()
        mine = torch.tensor([0.0 if each is None else each.item() for each in losses])
        dist.all_reduce(mine)
        learned += [(first + 1 + place, each) for place, each in enumerate(mine.view(window, parts).sum(1).tolist())]
        if (first + window) % WINDOW == 0:
            told.append((first + window, evaluated(ahead, held_out)))
    return {"training": learned, "held_out": told}


def set_rate(inner: torch.optim.Optimizer, rates: Iterator[float]) -> None:
    rate = next(rates)
    for group in inner.param_groups:
        group["lr"] = rate


def cut(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    return [dict(zip(batch, each, strict=True)) for each in zip(*(x.chunk(parts) for x in batch.values()), strict=True)]


def evaluated(ahead: Pipeline, held_out: Tensor) -> float:
    out = ahead.forward(cut(samples(held_out, EVALUATED, -1), ahead.schedule.microbatches))
    total = torch.stack([torch.zeros(()), *(each for each in out if each is not None)]).sum()
    dist.all_reduce(total)
    return total.item() / (EVALUATED * LENGTH)


def print_table(rows: dict[str, Any], ranks: int, updates: int) -> None:
    table = Table(title=f"a small GPT on {ranks} ranks after {updates} updates", title_justify="left")
    for column in ("", "held-out loss", "over 1f1b"):
        table.add_column(column, justify="right" if column else "left")
    first = rows["1f1b"]["held_out"][-1][1]
    for name, row in rows.items():
        loss = row["held_out"][-1][1]
        table.add_row(name, f"{loss:.4f}", f"{loss - first:+.4f}")
    Console(width=120).print(table)


def plot(rows: dict[str, Any], ranks: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, colour in SCHEDULES.items():
        training = torch.tensor([loss for _, loss in rows[name]["training"]])
        smooth = training.unfold(0, SMOOTHED, 1).mean(1)
        axes.plot(range(SMOOTHED, len(training) + 1), smooth, color=colour, alpha=0.35, linewidth=1)
        updates, losses = zip(*rows[name]["held_out"], strict=True)
        axes.plot(updates[1:], losses[1:], "o-", color=colour, markersize=4, label=f"{name}: {losses[-1]:.3f}")
    axes.set(xlabel="updates", ylabel="loss, nats a byte", ylim=(None, 4))
    axes.set_title(f"a small GPT on {ranks} stages: held-out loss (dots) and training loss", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
