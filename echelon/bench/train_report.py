"""What `echelon bench train` says and writes: the lines of Horovod's synthetic benchmark, and the same as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.bench.train_options import TrainOptions


@dataclass(frozen=True)
class Rate:
    """Images or tokens a second: the mean over the iterations, and 1.96 standard deviations."""

    mean: float
    spread: float

    @staticmethod
    def of(rates: Sequence[float]) -> Rate:
        return Rate(statistics.fmean(rates), 1.96 * statistics.pstdev(rates))

    def times(self, count: int) -> Rate:
        return Rate(count * self.mean, count * self.spread)

    def over(self, other: Rate) -> Rate:
        ratio = self.mean / other.mean
        return Rate(ratio, ratio * math.hypot(self.spread / self.mean, other.spread / other.mean))

    def __str__(self) -> str:
        return f"{self.mean:.1f} +-{self.spread:.1f}"


@dataclass(frozen=True)
class Result:
    """What a rank did in each iteration: among all of them and, if that was measured, alone."""

    options: TrainOptions
    ranks: int
    rates: Sequence[float]
    alone: Sequence[float] | None

    @property
    def each(self) -> Rate:
        return Rate.of(self.rates)

    @property
    def efficiency(self) -> Rate | None:
        return self.each.over(Rate.of(self.alone)) if self.alone else None

    def lines(self) -> Iterator[str]:
        unit, place = self.options.unit, self.options.place
        yield f"{unit.capitalize()}/sec per {place}: {self.each}"
        yield f"Total {unit}/sec on {self.ranks} {place}(s): {self.each.times(self.ranks)}"
        if self.efficiency is not None and self.alone:
            percent = self.efficiency.times(100)
            yield f"One {place} alone: {Rate.of(self.alone)} {unit}/sec"
            yield f"Scaling efficiency on {self.ranks} {place}(s): {percent.mean:.1f}% +-{percent.spread:.1f}%"

    def write(self, path: Path, machine: dict[str, Any]) -> None:
        figures = {"each": self.each, "total": self.each.times(self.ranks), "efficiency": self.efficiency}
        figures["alone"] = Rate.of(self.alone) if self.alone else None
        told: dict[str, Any] = {"benchmark": "train", "unit": f"{self.options.unit}/sec", "machine": machine}
        told |= {name: asdict(figure) if figure is not None else None for name, figure in figures.items()}
        told |= {"iterations": list(self.rates), "iterations alone": list(self.alone or [])}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told | {"options": asdict(self.options)}, indent=1) + "\n")


def heading(options: TrainOptions, ranks: int) -> Iterator[str]:
    yield f"Model: {options.model}"
    yield f"Batch size: {options.batch_size}"
    if not options.takes_images:
        yield f"Sequence length: {options.sequence_length}"
    yield f"Number of {options.place}s: {ranks}"
