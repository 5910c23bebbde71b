"""A run's folder as whoever looks at it later sees it: its config as tables, its rows, and what they add up to.

Needs no PyTorch. A run may be young, killed or of a version that wrote less: what is missing is None.
"""

from __future__ import annotations

import json
import statistics
import time
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from echelon.train import rows
from echelon.train.rows import Row

_PATIENCE = 60.0  # seconds without a row, and ten times those that a row takes, after which a run is not running
_CONFIG = "config.toml"


class NoRun(ValueError):
    """A folder that is none of a run."""


@dataclass(frozen=True)
class Run:
    folder: Path
    config: dict[str, dict[str, Any]]
    rows: list[Row]

    @property
    def name(self) -> str:
        return self.folder.name or self.folder.resolve().name

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    def points(self, name: str, kind: str = "step") -> list[tuple[int, float]]:
        """A curve, by step."""
        return [(row["step"], row[name]) for row in self.of(kind) if row.get(name) is not None]

    @cached_property
    def start(self) -> Row:
        """The last: of the job that runs, or ran."""
        return self.of("start")[-1] if self.of("start") else {}

    @property
    def model(self) -> str:
        return str(self.config.get("model", {}).get("name", ""))

    @property
    def steps(self) -> int | None:
        """As many as were asked for."""
        steps = self.config.get("train", {}).get("steps")
        return None if steps is None else int(steps)

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @property
    def loss(self) -> float | None:
        return self.last("loss")

    @property
    def unit(self) -> str:
        return "images" if any("images_s" in row for row in self.rows) else "tokens"

    @property
    def speed(self) -> float | None:
        return self.typical(f"{self.unit}_s")

    @property
    def joules(self) -> float | None:
        spent = [joules for _, joules in self.points("joules")]
        return sum(spent) if spent else None

    @property
    def a_joule(self) -> float | None:
        """Tokens or images, for all joules."""
        pairs = [(row[f"{self.unit}_joule"], row["joules"]) for row in self.of("step") if row.get("joules")]
        spent = sum(joules for _, joules in pairs)
        return sum(done * joules for done, joules in pairs) / spent if spent else None

    @property
    def layout(self) -> str:
        return str(self.start.get("layout", ""))

    @property
    def ranks(self) -> int | None:
        return self.start.get("ranks")

    @property
    def seconds(self) -> float | None:
        """That all its jobs have run, from their first row to their last."""
        begun: list[float] = []
        ended: list[float] = []
        for row in self.rows:
            if "time" in row:
                if row["kind"] == "start" or not begun:
                    begun.append(row["time"])
                    ended.append(row["time"])
                ended[-1] = row["time"]
        return sum(ended) - sum(begun) if begun else None

    @property
    def when(self) -> float | None:
        return next((row["time"] for row in self.rows if "time" in row), None)

    @property
    def state(self) -> str:
        """done, stopped, running or failed: a job that ended without saying so is taken to run until it is silent."""
        if not self.rows:
            return "failed" if self._silence() > _PATIENCE else "running"
        for row in reversed(self.rows):
            if row["kind"] == "end":
                return str(row.get("why", "done"))
            if row["kind"] == "start":
                break
        every = self.config.get("train", {}).get("log_every", 1)
        return "failed" if self._silence() > _PATIENCE + 10 * every * (self.last("step_s") or 0) else "running"

    def last(self, name: str) -> float | None:
        points = self.points(name)
        return points[-1][1] if points else None

    def typical(self, name: str) -> float | None:
        """The median, without the first row if there are others: it has the start in it."""
        values = [value for _, value in self.points(name)]
        return statistics.median(values[1:] or values) if values else None

    def memory(self) -> dict[str, Any] | None:
        """What memory.json says."""
        try:
            told = json.loads((self.folder / "memory.json").read_text())
        except (OSError, ValueError):
            return None
        return told if isinstance(told, dict) else None

    def _silence(self) -> float:
        file = self.folder / rows.FILE
        return time.time() - (file if file.exists() else self.folder).stat().st_mtime


def is_run(folder: Path) -> bool:
    return (folder / _CONFIG).exists() or (folder / rows.FILE).exists()


def open_run(folder: Path) -> Run:
    if not is_run(folder):
        raise NoRun(f"{folder} is not the folder of a run: it has neither {_CONFIG} nor {rows.FILE}")
    try:
        config = tomllib.loads((folder / _CONFIG).read_text())
    except (OSError, ValueError):
        config = {}
    return Run(folder, config, rows.read(folder / rows.FILE))
