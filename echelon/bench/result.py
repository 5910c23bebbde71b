"""What was measured, as plain data: rows of figures, one a size, for JSON, tables and pictures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Row:
    """One size: each contender's figures, by the keys of `table.COLUMNS`."""

    size: int
    iterations: int
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    valid: dict[str, bool] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """One benchmark. `contenders` maps the label of each to words that say what it was."""

    benchmark: str
    title: str
    columns: str
    datatype: str
    contenders: dict[str, str]
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    failure: str = ""

    @property
    def sized(self) -> bool:
        return any(row.size for row in self.rows)

    def series(self, label: str, key: str) -> list[float]:
        return [row.figures[label][key] for row in self.rows if label in row.figures]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Result:
        fields = json.loads(path.read_text())
        return Result(**fields | {"rows": [Row(**row) for row in fields["rows"]]})
