"""What averaging seldom costs in accuracy and saves in bytes: `echelon run -n 4 benchmarks/local_sgd.py`.

A small GPT learns the bytes of Python's own standard library on ranks of dp: synchronously, and as local SGD that is
averaged every 2, 4, 8 and 16 steps. All take the same steps with the same samples from the same first values, and the
loss is that of the averaged model on files that none has seen. Bytes are what the recorder saw a rank send.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import echelon
from echelon import models
from echelon.parallel import batch
from echelon.parallel.apply import Strategies, parallelize, summed_over
from echelon.parallel.average import average
from echelon.parallel.layout import Grid, Layout
from echelon.train.config import Optimizer, Schedule
from echelon.train.optimizer import make_optimizer
from echelon.train.schedule import learning_rate

LENGTH, SAMPLES, EVALUATED = 128, 16, 128
EVERY = (0, 2, 4, 8, 16)  # steps between averagings; 0: synchronous
SIZES = {"vocabulary": 256, "context": LENGTH, "dim": 128, "layers": 4, "heads": 4}
OPTIMIZER, SCHEDULE = Optimizer(lr=2e-3), Schedule(warmup=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320, help="a multiple of 16 (default: 320)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    if arguments.steps < 16 or arguments.steps % 16:
        parser.error(f"--steps {arguments.steps}: all contenders must end with an average: take a multiple of 16")
    dist.init_process_group("echelon")
    grid = Layout(dp=-1).build()
    read, held_out = text()
    rows = {name_of(every): trained(grid, every, arguments.steps, read, held_out) for every in EVERY}
    if dist.get_rank() == 0:
        about = {"what": __doc__.splitlines()[0], "torch": torch.__version__, "cores": os.cpu_count()}
        about |= {"ranks": grid.layout.dp, "steps": arguments.steps, "samples": SAMPLES, "length": LENGTH} | SIZES
        print_table(rows, grid.layout.dp, arguments.steps)
        if arguments.json:
            arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def name_of(every: int) -> str:
    return f"averaged every {every} steps" if every else "synchronous"


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to learn from, and every twentieth file's, which are not."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [[file for index, file in enumerate(files) if (index % 20 == 19) is last] for last in (False, True)]
    read, held_out = (b"".join(file.read_bytes() for file in part) for part in parts)
    return as_tensor(read), as_tensor(held_out)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def samples(source: torch.Tensor, count: int, seed: int) -> dict[str, torch.Tensor]:
    starts = torch.randint(len(source) - LENGTH - 1, (count,), generator=torch.Generator().manual_seed(seed))
    cut = torch.stack([source[start : start + LENGTH + 1] for start in starts])
    return {"tokens_BS": cut[:, :-1], "targets_BS": cut[:, 1:]}


def trained(grid: Grid, every: int, steps: int, read: torch.Tensor, held_out: torch.Tensor) -> dict[str, Any]:
    """The held-out loss of a model after so many steps, and what a rank sent in them."""
    strategies = Strategies(average_every=every)
    model: Any = parallelize(models.build("gpt2", **SIZES), grid, strategies)
    optimizer = make_optimizer(model, OPTIMIZER)
    with echelon.comm.record() as log:
        for step in range(steps):
            for group in optimizer.inner.param_groups:
                group["lr"] = learning_rate(step, steps, OPTIMIZER.lr, SCHEDULE)
            mine = batch.part(samples(read, SAMPLES, step), grid)
            loss = model(**mine) / batch.count(mine["targets_BS"], summed_over(grid, strategies))
            loss.backward()
            optimizer.step(max_norm=1.0)
            if every and (step + 1) % every == 0:
                average(model, optimizer, grid.mesh("dp"))
    sent = sum(record.wire for record in log)
    with torch.no_grad():
        mine = batch.part(samples(held_out, EVALUATED, -1), grid)
        total = model(**mine) / (EVALUATED * LENGTH)
    dist.all_reduce(total)
    return {"held-out loss": total.item(), "bytes a step": sent / steps}


def print_table(rows: dict[str, Any], ranks: int, steps: int) -> None:
    table = Table(title=f"a small GPT on {ranks} ranks after {steps} steps", title_justify="left")
    for column in ("", "held-out loss", "over synchronous", "MB a step and rank", "of synchronous"):
        table.add_column(column, justify="right" if column else "left")
    first = rows[name_of(0)]
    for name, row in rows.items():
        loss, sent = row["held-out loss"], row["bytes a step"]
        more = f"{loss - first['held-out loss']:+.4f}"
        table.add_row(name, f"{loss:.4f}", more, f"{sent / 1e6:.2f}", f"{sent / first['bytes a step']:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
