"""Training, from top to bottom: build what the config says, go on where the last checkpoint is, and take steps.

    Trainer(config).run()     # on every rank, under any launcher; or in one process

The global batch, its order and every random number depend on the step alone, never on the layout. So a run is the same
run on other ranks, and one that was interrupted is the same as one that was not.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.models.presets import is_causal
from echelon.parallel.apply import pipeline, summed_over
from echelon.parallel.average import average, average_buffers
from echelon.parallel.tiling import needs_of
from echelon.train.build import build_model, choose_device, in_dtype, join_world, limit_waiting
from echelon.train.checkpoint import Checkpoints
from echelon.train.checks import check, check_files, meta_model, micro_batch, passes
from echelon.train.config import Config
from echelon.train.data import Loader, Order, open_sources
from echelon.train.evaluate import Evaluation
from echelon.train.faults import Diverged, StopRequest, explain
from echelon.train.job_folder import open_folder, same_data, write_config
from echelon.train.memory import measure_memory, predicted
from echelon.train.metrics import Meter
from echelon.train.optimizer import make_optimizer
from echelon.train.passes import Passes
from echelon.train.schedule import learning_rate


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, or `stopped` where it can be taken up again."""

    step: int
    loss: float
    held_out: float  # not a number, where nothing was
    done: bool


class Trainer:
    """One run on this rank. Attributes are there to be looked at: `model`, `optimizer`, `grid`, `step`, …"""

    def __init__(self, config: Config, folder: Path | str | None = None) -> None:
        """`folder` is the run's: a new one in runs/, or one that is there, to go on with."""
        join_world()
        self.config = config = check(config, dist.get_world_size())
        check_files(config)
        self.folder, self._lock = open_folder(config, folder)
        self.device = choose_device(config)
        self.grid = config.layout.build(self.device.type, config.routes.chosen)
        limit_waiting(self.grid, config.train.timeout)
        self.model: Any = build_model(config, self.grid, self.device)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        runner = pipeline(self.model, self.grid, config.strategies, passes(config)) if config.layout.depth > 1 else None
        tiles = math.prod(config.layout.grids[self.grid.stage].tiles)
        self.passes = Passes(self.model, self.optimizer, summed_over(self.grid, config.strategies), runner, tiles)

        self.sources = sources = open_sources(config, self.folder / "data")
        how: dict[str, Any] = {
            "kind": config.strategies.sequence,
            "causal": is_causal(config.architecture),
            "device": self.device,
            "needs_of": partial(needs_of, self.model, runner),
        }
        order = Order(len(sources.train), config.train.seed)
        self.loader = Loader(
            sources.train, order, self.grid, batch=config.train.batch, micro_batch=micro_batch(config), **how
        )
        self.evaluation = Evaluation(config, sources.held_out, self.grid, **how)

        about = {"model": dict(config.model), "precision": config.strategies.precision}
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", self.model, self.optimizer, keep=config.checkpoint.keep, about=about
        )
        self.data = {"samples": len(sources.train), "length": config.length, "seed": config.train.seed}
        saved = self.checkpoints.load() or {"step": 0, "samples": 0, "data": self.data}
        same_data(saved["data"], self.data)
        self.step: int = saved["step"]
        self.samples: int = saved["samples"]
        self.loss, self.held_out, self._averaged = math.nan, math.nan, self.step
        write_config(config, self.folder)
        self._memory_step = max(config.record.first, 1)  # in the first step there is no optimizer state yet
        measures = self.step <= self._memory_step < config.train.steps
        self._expected = predicted(config, ranks=[self.grid.rank]) if measures else None
        self.meter = Meter(config, self.folder, self.grid, meta_model(config), step=self.step)

    def run(self, stop: StopRequest | None = None) -> Outcome:
        """Take the steps that are left, or those until a stop is asked for."""
        train, every = self.config.train, self.config.checkpoint.every
        folder = self.folder if self.grid.rank == 0 else None
        stopping = False
        with contextlib.nullcontext(stop) if stop else StopRequest() as request:
            while self.step < train.steps and not stopping:
                stopping = self.take_step(request.came(folder)) and self.step < train.steps
                last = self.step == train.steps
                if last or (train.eval_every and self.step % train.eval_every == 0):
                    self.evaluate()
                if last or stopping or (every and self.step % every == 0):
                    self.save()
            self.checkpoints.wait()
        self.meter.event("end", self.step, why="stopped" if stopping else "done")
        self.close()
        return Outcome(self.step, self.loss, self.held_out, not stopping)

    def close(self) -> None:
        """Complete the checkpoint that is being written, and let go of files and threads."""
        self.checkpoints.close()
        self.loader.close()
        self.evaluation.close()
        self.meter.close()
        if self._lock is not None:
            self._lock.close()

    def take_step(self, stop: bool = False) -> bool:
        """One step; True if any rank was asked to stop."""
        train, average_every = self.config.train, self.config.strategies.average_every
        lr = learning_rate(self.step, train.steps, self.config.optimizer.lr, self.config.schedule)
        for group in self.optimizer.inner.param_groups:
            group["lr"] = lr
        self.model.place.step = self.step

        own_loss = self.passes.run([in_dtype(given, self.config) for given in self.loader.load(self.samples)])
        self.loader.read_ahead()
        self.meter.read_ahead(self.step + 1)
        if self.step == self._memory_step:
            self._note_memory()
        told_loss = own_loss.to("cpu", non_blocking=True)  # the norm is read after it, and before the step is taken
        norm = self.passes.update(train.clip or None)

        self.loss, norm, skipped, fatal, stopping = self._agree(told_loss.item(), norm, stop)
        if fatal:
            self._give_up(norm, told_loss.item())
        if skipped:
            self.meter.event("skip", self.step + 1, norm=norm)
        self.step, self.samples = self.step + 1, self.samples + train.batch
        if average_every and self.step % average_every == 0:
            self._average()
        self.meter.step(self.step, self.loss, norm, lr)
        return stopping

    def evaluate(self) -> None:
        """The loss on what was held out; in local SGD, of the mean of the models."""
        self._average()
        average_buffers(self.model, self.grid.mesh("dp"))
        if found := self.evaluation.run(self.model, self.passes):
            self.held_out = found["loss"]
            self.meter.event("eval", self.step, **found)

    def save(self) -> None:
        """Begin a checkpoint; it is written while training goes on."""
        self._average()
        average_buffers(self.model, self.grid.mesh("dp"))
        stall = self.checkpoints.save(self.step, {"step": self.step, "samples": self.samples, "data": self.data})
        self.meter.event("save", self.step, stall_s=stall)

    def _agree(self, own_loss: float, norm: float, stop: bool) -> tuple[float, float, bool, bool, bool]:
        """The loss of the whole batch and the norm of all gradients; whether the step was skipped somewhere, whether
        that ends the run, and whether any rank was asked to stop: one small sum over all ranks."""
        layout, optimizer = self.grid.layout, self.optimizer
        copies = (
            layout.tp * math.prod(layout.grids[-1].tiles) * (layout.dp if self.config.strategies.average_every else 1)
        )
        finite = math.isfinite(norm) and math.isfinite(own_loss)
        adapting = optimizer.is_scaling and optimizer.loss_scale >= 1 and math.isfinite(own_loss)  # fp16's usual way
        fatal = not finite and not adapting and self.config.train.non_finite == "stop"
        of_stage = norm**2 / layout.dp if self.passes.is_versioned else 0.0
        told = torch.tensor([own_loss / copies, of_stage, not finite, fatal, stop], dtype=torch.float64)
        dist.all_reduce(told)
        loss, squares, *flags = told.tolist()
        skipped, ends, stops = (flag > 0 for flag in flags)
        return loss, math.sqrt(squares) if self.passes.is_versioned else norm, skipped, ends, stops

    def _average(self) -> None:
        """In local SGD: all ranks of dp become their mean, once in a step."""
        if self.config.strategies.average_every and self._averaged < self.step:
            average(self.model, self.optimizer, self.grid.mesh("dp"))
            self._averaged = self.step

    def _note_memory(self) -> None:
        held = measure_memory(self.config, self.grid, self.model, self.optimizer, self._expected)
        if self.grid.rank == 0:
            (self.folder / "memory.json").write_text(json.dumps(held, indent=1))

    def _give_up(self, norm: float, own_loss: float) -> None:
        """The loss or the gradients are not finite, on some rank. What was saved before is kept."""
        what = explain(self.step, self.loss, norm, own_loss, self.model, self.optimizer)
        self.checkpoints.wait()
        raise Diverged(
            f"{what}. Lower optimizer.lr, lengthen schedule.warmup, or go on regardless with "
            'train.non_finite = "skip", which leaves out steps whose gradients are not finite'
        )
