"""What may go wrong in a run, and how it ends: asked to stop, or with a loss that is no number.

A run is asked to stop by a signal to its ranks (SIGTERM, or what a scheduler sends beforehand), or by the file `stop`
in its folder, which `echelon train` makes when it gets such a signal itself. One rank that has noticed is enough: the
ranks agree at the end of each step.
"""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from echelon.launch.report import ranks_text
from echelon.launch.start import WARNINGS
from echelon.parallel.optimizer import Optimizer

STOPPED = 75  # the exit code of a run that was asked to stop, and can go on where it was (EX_TEMPFAIL)
STOP_FILE = "stop"
_STARTING_SECONDS = 60.0  # between a job's beginning and a rank's first line of code, on a slow file system


class Diverged(RuntimeError):
    """The loss or a gradient is not finite."""


class StopRequest:
    """Whether this rank was asked to stop since it was made. As a context: signals are heeded inside."""

    def __init__(self) -> None:
        self._made = time.time()
        self._received = 0
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        self._handlers = {number: signal.signal(number, self._receive) for number in {signal.SIGTERM, *WARNINGS}}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def came(self, folder: Path | None) -> bool:
        """By a signal or, in a folder that is looked into, by the file; one that an earlier job was sent is none."""
        if self._received or folder is None:
            return bool(self._received)
        try:
            return (folder / STOP_FILE).stat().st_mtime >= self._made - _STARTING_SECONDS
        except FileNotFoundError:
            return False

    def _receive(self, number: int, _frame: object) -> None:
        self._received = number


def explain(step: int, loss: float, norm: float, own_loss: float, model: nn.Module, optimizer: Optimizer) -> str:
    """What is not finite, on which rank and in which parameter; called by all ranks."""
    bad_value = next((name for name, each in model.named_parameters() if not _is_finite(each)), "")
    told: list[tuple[bool, str, str]] = [(True, "", "")] * dist.get_world_size()
    dist.all_gather_object(told, (math.isfinite(own_loss), bad_value, optimizer.non_finite))
    losses = [rank for rank, (finite, _, _) in enumerate(told) if not finite]
    values = {name: rank for rank, (_, name, _) in reversed(list(enumerate(told))) if name}
    gradients = {name: rank for rank, (_, _, name) in reversed(list(enumerate(told))) if name}
    parts = [f"step {step + 1}: the loss is {loss:g} and the gradients' norm {norm:g}"]
    if losses:
        parts.append(f"the loss is not finite on {ranks_text(losses)}")
    for what, found in (("parameter", values), ("gradient", gradients)):
        if found:
            name, rank = min(found.items(), key=lambda item: item[1])
            parts.append(f"the first {what} that is not finite is {name} on rank {rank}")
    return "; ".join(parts)


def _is_finite(parameter: nn.Parameter) -> bool:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return bool(torch.isfinite(local).all())
