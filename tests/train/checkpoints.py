"""Training in legs: each builds a model in some layout, loads what the leg before has saved, and goes on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.parallel import batch as batches
from echelon.parallel.apply import parallelize
from echelon.parallel.layout import Grid
from echelon.parallel.optimizer import Optimizer
from echelon.train.checkpoint import Checkpoints
from tests.parallel.matrix import OPTIMIZERS, Row, build, global_batch, grid_of, targets

LEG = 2  # steps
STEPS = 3 * LEG


@cache
def alone(family: str, optimizer: str = "adamw") -> list[float]:
    """The losses of one process that is not disturbed."""
    model: Any = build(family).double()
    update = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for step in range(STEPS):
        model.place.step = step
        batch = global_batch(family, step, "cpu", torch.float64)
        loss = model(**batch) / (targets(batch) != -100).sum()
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


class Training:
    """A model in a layout, with its optimizer and checkpoints."""

    def __init__(
        self,
        family: str,
        row: Row,
        folder: Path,
        optimizer: str = "adamw",
        *,
        keep: int = 2,
        on_cpu: bool = False,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.family, self.row = family, row
        self.grid: Grid = grid_of(row.layout, "cpu")
        self.model: Any = parallelize(build(family), self.grid, row.strategies)
        self.optimizer = Optimizer(OPTIMIZERS[optimizer], self.model, on_cpu=on_cpu)
        description = {"model": {"name": family}, "precision": row.strategies.precision} | (about or {})
        self.checkpoints = Checkpoints(folder, self.model, self.optimizer, keep=keep, about=description)

    def step(self, number: int) -> float:
        """One step; returns its loss over all ranks."""
        self.model.place.step = number
        whole = global_batch(self.family, number, "cpu", next(self.model.parameters()).dtype, self.row.batch)
        given = batches.part(whole, self.grid, kind=self.row.strategies.sequence, causal=self.family != "bert")
        loss = self.model(**given) / batches.count(targets(given), self.grid.mesh("data"))
        self.optimizer.scale(loss).backward()
        self.optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total, group=self.grid.mesh("data").get_group())
        return total.item()


def leg(family: str, row: Row, folder: Path, first: int, optimizer: str = "adamw", on_cpu: bool = False) -> list[float]:
    """Train some steps from step `first` on, where the folder's newest checkpoint must stand, and save."""
    training = Training(family, row, folder, optimizer, on_cpu=on_cpu)
    state = training.checkpoints.load()
    assert state == (None if first == 0 else {"step": first, "samples": 4 * first})
    losses = [training.step(number) for number in range(first, first + LEG)]
    training.checkpoints.save(first + LEG, {"samples": 4 * (first + LEG)})
    training.checkpoints.close()
    return losses
