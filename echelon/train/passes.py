"""The passes of a step: one after the other or, in a pipeline, as its schedule says.

Either way they leave the gradients of the whole step, divided by the targets that count, and every pass gives its loss
on the ranks where it ends. A schedule with versions has its updates inside: each with a count of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from echelon.parallel import batch as batches
from echelon.parallel import data
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.pipeline.run import Pipeline

Given = dict[str, Tensor]


class Passes:
    """Of one rank. `summed_over` are the ranks whose gradients are summed, and targets counted, in a step."""

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        summed_over: DeviceMesh,
        pipeline: Pipeline | None = None,
        tiles: int = 1,
    ) -> None:
        """`tiles` are the ranks that have the same samples, each a tile of their images."""
        self._tiles = tiles
        self._model, self._optimizer, self._summed_over = model, optimizer, summed_over
        self._pipeline = pipeline
        self.is_versioned = pipeline is not None and pipeline.schedule.is_versioned

    def run(self, passes: Sequence[Given]) -> Tensor:
        """Forward and backward; returns the sum of the losses that ended here (with versions, their mean)."""
        updates = [range(len(passes))] if self._pipeline is None else self._pipeline.schedule.updates
        targets = [torch.cat([targets_of(passes[number]).flatten() for number in update]) for update in updates]
        counts = batches.counts(targets, self._summed_over, alike=1 if has_own_targets(passes[0]) else self._tiles)
        count_of = {number: count for update, count in zip(updates, counts, strict=True) for number in update}
        total = torch.zeros((), dtype=torch.float64, device=counts.device)
        if self._pipeline is None:
            for number, given in enumerate(passes):
                more_to_come = number + 1 < len(passes)
                with data.accumulate(self._model) if more_to_come else contextlib.nullcontext():
                    loss = self._model(**given) / count_of[number]
                    self._optimizer.scale(loss).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            return total
        losses = self._pipeline.run(
            passes,
            lambda out, number: self._optimizer.scale(out / count_of[number]),
            self._optimizer if self.is_versioned else None,
        )
        for ended in losses:
            if ended is not None:
                total += ended
        return total / self._optimizer.loss_scale / len(updates)

    def update(self, clip: float | None) -> float:
        """After a run, unless it has updated itself; returns the norm of the gradients (with versions, of those of this
        stage for the last one; not a number if any had none).
        """
        if self._pipeline is None or not self.is_versioned:
            return self._optimizer.step(clip)
        norms = self._pipeline.norms
        return norms[-1] if all(map(math.isfinite, norms)) else math.nan

    def forward(self, passes: Sequence[Given]) -> list[Any]:
        """What the model gives for each pass, on the ranks where it ends; None on the others."""
        if self._pipeline is None:
            return [self._model(**given) for given in passes]
        return self._pipeline.forward(passes)


def targets_of(given: Given) -> Tensor:
    return next(each for name, each in given.items() if name.startswith("targets_"))


def has_own_targets(given: Given) -> bool:
    """Whether a rank has the targets of its tile alone."""
    return "targets_BHW" in given and given["targets_BHW"].shape[-2:] != given["images_BCHW"].shape[-2:]
