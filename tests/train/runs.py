"""Small runs for tests: their configs, and what they wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from echelon.train.config import Config, dump, parse

TINY: dict[str, dict[str, Any]] = {
    "model": {"name": "gpt2", "vocabulary": 64, "context": 16, "dim": 32, "layers": 2, "heads": 4, "dropout": 0.1},
    "data": {"kind": "synthetic", "samples": 40, "held_out": 0.2},
    "train": {"steps": 6, "batch": 8, "log_every": 1, "eval_samples": 8, "device": "cpu"},
    "optimizer": {"lr": 1e-2},
    "schedule": {"warmup": 2},
    "record": {"first": 1, "steps": 2},
    "strategies": {"precision": "fp64"},
}


def tables(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables of a tiny run, with some settings changed."""
    return {name: TINY.get(name, {}) | sections.get(name, {}) for name in [*TINY, *sections]}


def config(**sections: dict[str, Any]) -> Config:
    return parse(tables(**sections))


def write(path: Path, **sections: dict[str, Any]) -> Path:
    """The same as a file."""
    path.write_text(dump(config(**sections)))
    return path


def rows(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    """What a run has written of one kind."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == kind]


def losses(folder: Path) -> list[float]:
    """Of all steps; none is null, which would equal any other."""
    found = [row["loss"] for row in rows(folder)]
    assert found
    assert all(isinstance(loss, float) and math.isfinite(loss) for loss in found), found
    return found
