"""The rows of a run's metrics.jsonl: one JSON object a line, appended; what a number is not, is null.

Needs no PyTorch: whoever lists runs, or follows one, need not wait for it.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FILE = "metrics.jsonl"


def encode(row: Row) -> str:
    """A line. JSON has no NaN and no infinity."""
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def read(file: Path) -> list[Row]:
    """All rows; a line that a killed job left unfinished is none."""
    if not file.exists():
        return []
    return decode(file.read_bytes())


def decode(lines: bytes) -> list[Row]:
    """The rows of some lines; what is none is passed over."""
    rows = []
    for line in lines.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"kind", "step"} <= row.keys():
            rows.append(row)
    return rows


def cut(file: Path, step: int) -> None:
    """Forget what came after a step: a run that goes on from there will say it again."""
    if file.exists():
        new = file.with_suffix(".new")
        new.write_text("".join(encode(row) for row in read(file) if row["step"] <= step))
        new.replace(file)


def end_as_failed(file: Path, since: float) -> None:
    """Say of a job that began after a moment, and never said how it ended, that it failed."""
    found = read(file)
    begun = any(row["kind"] == "start" and row.get("time", 0.0) >= since for row in found)
    if begun and found[-1]["kind"] != "end":
        row = {"kind": "end", "step": found[-1]["step"], "time": time.time(), "why": "failed"}
        finished = file.read_bytes().endswith(b"\n")
        with file.open("a") as rows:
            rows.write(encode(row) if finished else f"\n{encode(row)}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(of) for name, of in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
