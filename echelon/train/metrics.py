"""What a run tells about itself: a row in metrics.jsonl every few steps, the same for TensorBoard, and the record.

Each rank notes what it communicated, in memory, and every `log_every` steps the ranks put their figures together in
one small collective, over a group of the meter's own: what is logged is the training's traffic, not the meter's.
Between two rows nothing is exchanged and nothing is synchronised.
"""

from __future__ import annotations

import importlib.util
import math
import resource
import socket
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.comm.recorder import recorder
from echelon.comm.records import Log, Record, RecordWriter
from echelon.parallel.apply import TWINS
from echelon.parallel.layout import VIEWS, Grid
from echelon.plan.flops import training_flops
from echelon.plan.hardware import peak_flops
from echelon.train import rows
from echelon.train.config import Config
from echelon.train.energy import Energy, open_nvml, open_rapl

_VIEWS = (*VIEWS, TWINS)
_FIRST = 1  # the step that has a row whatever `log_every` is: a sign of life, and the curve's beginning


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and what it could tell."""

    host: str
    gpu: str  # its UUID; empty for a CPU
    flops: float  # that its device can do in a second
    energy: tuple[str, ...]  # the counters that it can read


@dataclass
class Interval:
    """What this rank has done since the last row."""

    steps: int = 0
    seconds: float = 0.0
    blocked: int = 0  # nanoseconds
    wire: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class Meter:
    """One a rank; made collectively, after the groups, at the step that training begins or goes on from.

    It writes the row `start` itself, and forgets rows of later steps that an earlier job has left.
    """

    def __init__(self, config: Config, folder: Path, grid: Grid, model: nn.Module, *, step: int) -> None:
        self._config, self._folder, self._grid, self._model = config, folder, grid, model
        self._device = device_of(grid)
        rapl, nvml = open_rapl(), open_nvml(_uuid(self._device)) if self._device.type == "cuda" else None
        counters: list[Energy | None] = [rapl, nvml]
        if grid.rank == 0:
            rows.cut(folder / rows.FILE, step)
            if config.record.steps and step + 1 < self._window[1]:
                _clear(folder / "record")
        self._group = dist.new_group()  # where ranks meet: those that share cores then measure together
        peak = peak_flops(self._device, config.strategies.precision)
        told = tuple(counter.name for counter in counters if counter)
        here = Place(socket.gethostname(), _uuid(self._device), peak, told)
        places: list[Any] = [None] * grid.layout.size
        dist.all_gather_object(places, here, group=self._group)
        self._counters = _mine(places, grid.rank, rapl, nvml)
        self._energy = sorted({name for place in places for name in place.energy})
        self._peak = sum(place.flops for rank, place in enumerate(places) if _leads(places, rank, by_gpu=True))
        self._flops = self._flops_of_a_step()

        self._log = Log()
        self._writer: RecordWriter | None = None
        recorder.attach(self._log)
        self._keep_record(step)
        self._under_way: list[Record] = []
        self._interval, self._last, self._joules = Interval(), time.perf_counter(), self._read_joules()
        self._joules_ahead: float | None = None
        self._board: Any = None
        if grid.rank == 0:
            self._file = (folder / rows.FILE).open("a")
            self._board = _tensorboard(folder, step)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        about = {"ranks": grid.layout.size, "layout": repr(grid.layout), "drawing": str(grid.layout)}
        about |= {"parameters": parameters, "device": _name(self._device), "peak_flops": self._peak}
        self.event("start", step, **about, energy=self._energy)

    def read_ahead(self, step: int) -> None:
        """While the device is at work on a step: a GPU takes its time to tell its energy."""
        if self._has_row(step):
            self._joules_ahead = self._read_joules()

    def step(self, step: int, loss: float, norm: float, lr: float) -> None:
        """After each step, by every rank."""
        now = time.perf_counter()
        self._interval.steps += 1
        self._interval.seconds += now - self._last
        self._last = now
        self._take_records()
        if self._has_row(step):
            figures = self._gather()
            if self._grid.rank == 0:
                told = {"kind": "step", "step": step, "time": time.time(), "loss": loss, "lr": lr, "norm": norm}
                self._write(told | self._row(figures))
            self._interval = Interval()
        self._keep_record(step)

    def event(self, kind: str, step: int, **values: Any) -> None:
        """By every rank. The time since the last step, and its traffic, are those of an evaluation, not of training."""
        if kind == "eval":
            self._log.clear()
            self._last = time.perf_counter()
        if self._grid.rank == 0:
            self._write({"kind": kind, "step": step, "time": time.time()} | values)

    def close(self) -> None:
        recorder.detach(self._log)
        self._end_record()
        if self._grid.rank == 0:
            self._file.close()
        if self._board is not None:
            self._board.close()

    @property
    def _window(self) -> tuple[int, int]:
        """The first of the steps that are recorded, and the first after them."""
        first = max(self._config.record.first, 1)
        return first, first + self._config.record.steps

    def _keep_record(self, step: int) -> None:
        """After a step: begin to write records, or end."""
        first, end = self._window
        if not first <= step + 1 < end:
            self._end_record()
        elif self._writer is None:
            self._writer = RecordWriter(self._folder / "record", self._grid.rank, self._grid.layout.size)
            recorder.attach(self._writer)

    def _end_record(self) -> None:
        if self._writer is not None:
            recorder.detach(self._writer)
            self._writer.close()
            self._writer = None

    def _take_records(self) -> None:
        """Sum up what is over; groups of no dimension (checkpoints', the meter's) do not belong to a step."""
        new = self._log[:]
        del self._log[: len(new)]
        self._log.steps.clear()
        records, self._under_way = self._under_way + new, []
        for record in records:
            if not record.ended:
                self._under_way.append(record)
            elif record.dimension in _VIEWS:
                self._interval.blocked += record.blocked
                self._interval.wire[record.dimension] += record.wire

    def _gather(self) -> Tensor:
        """A row a rank: memory, share of time blocked, joules, and bytes a step by view."""
        joules = self._read_joules() if self._joules_ahead is None else self._joules_ahead
        spent, self._joules, self._joules_ahead = joules - self._joules, joules, None
        since = self._interval
        wire = [since.wire[view] / since.steps for view in _VIEWS]
        mine = [peak_memory(self._device), since.blocked / 1e9 / since.seconds, spent, *wire]
        where = self._device if dist.get_backend(self._group) == "nccl" else torch.device("cpu")
        parts = [torch.zeros(len(mine), dtype=torch.float64, device=where) for _ in range(self._grid.layout.size)]
        dist.all_gather(parts, torch.tensor(mine, dtype=torch.float64, device=where), group=self._group)
        return torch.stack(parts).cpu()

    def _row(self, figures: Tensor) -> dict[str, Any]:
        seconds = self._interval.seconds / self._interval.steps
        unit, count = ("tokens", self._config.length) if hasattr(self._model, "tokens") else ("images", 1)
        done = self._config.train.batch * count
        memory, exposed, joules = (figures[:, place] for place in range(3))
        row: dict[str, Any] = {
            "step_s": seconds,
            f"{unit}_s": done / seconds,
            "mfu": self._flops / seconds / self._peak,
            "memory": int(memory.max()),
            "exposed": exposed.mean().item(),
        }
        if self._energy:
            spent = joules.sum().item()
            row |= {"joules": spent, f"{unit}_joule": done * self._interval.steps / spent if spent else None}
        wire = dict(zip(_VIEWS, figures[:, 3:].mean(0).tolist(), strict=True))
        return row | {"wire": {view: sent for view, sent in wire.items() if sent}}

    def _flops_of_a_step(self) -> int:
        config = self._config
        return config.train.batch * training_flops(self._model, length=config.length, image=config.image)

    def _has_row(self, step: int) -> bool:
        return step % self._config.train.log_every == 0 or step in (_FIRST, self._config.train.steps)

    def _read_joules(self) -> float:
        try:
            return sum(counter.joules() for counter in self._counters)
        except OSError:  # a counter that fell silent is no reason to stop training
            return math.nan

    def _write(self, row: rows.Row) -> None:
        self._file.write(rows.encode(row))
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(row).items():
                self._board.add_scalar(name, value, row["step"])


def peak_memory(device: torch.device) -> int:
    """Bytes: what PyTorch had on a GPU at the most; of a process on a CPU, all its memory at the most."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_of(grid: Grid) -> torch.device:
    kind = grid.mesh("world").device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"


def _leads(places: list[Place], rank: int, *, by_gpu: bool) -> bool:
    """Whether a rank is the first of its node or, `by_gpu`, of its GPU; without GPUs each has a share of the cores."""
    here = places[rank]
    if by_gpu and not here.gpu:
        return True
    others = places[:rank]
    return all((other.host, other.gpu if by_gpu else "") != (here.host, here.gpu if by_gpu else "") for other in others)


def _mine(places: list[Place], rank: int, rapl: Energy | None, nvml: Energy | None) -> list[Energy]:
    """What this rank reads for itself and for those that share it."""
    own = [rapl if _leads(places, rank, by_gpu=False) else None, nvml if _leads(places, rank, by_gpu=True) else None]
    return [counter for counter in own if counter is not None]


def _clear(folder: Path) -> None:
    """Of an earlier job's record, which may have had more ranks."""
    for file in folder.glob("rank-*"):
        file.unlink()


def _tensorboard(folder: Path, step: int) -> Any:
    """A writer, where TensorBoard is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)


def _scalars(row: rows.Row) -> dict[str, float]:
    """The curves that a row is a point of."""
    if row["kind"] not in ("step", "eval", "save"):
        return {}
    flat = {name: of for name, of in row.items() if name not in ("kind", "step", "time", "wire")}
    flat |= {f"wire/{view}": sent for view, sent in row.get("wire", {}).items()}
    numbers = {name: of for name, of in flat.items() if isinstance(of, int | float)}
    return numbers if row["kind"] == "step" else {f"{row['kind']}/{name}": of for name, of in numbers.items()}
