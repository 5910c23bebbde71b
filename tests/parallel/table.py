"""Writes the matrix's results as a page: `python -m tests.parallel.table docs/matrix.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.progress import track

from tests.parallel.matrix import ROWS, STEPS, Row, train
from tests.pool import Pool

HEAD = f"""# Any layout equals one process: the matrix

Written by `python -m tests.parallel.table docs/matrix.md`; `tests/parallel/test_matrix.py` holds each cell to 1e-9.

Each cell is the largest relative error, in norm, of any parameter's gradient in any of {STEPS} steps of training (SGD
with momentum, fp64, dropout 0.1 where the model has it), beside the same model on one process. Below it, the payload
that rank 0 sent in a step, by dimension of the layout, in bytes: recorded, and equal to what `plan/traffic.py`
predicts. Models are tiny (two blocks, 32 features), and so are the bytes; strategies are not.
"""


def main() -> None:
    page = Path(sys.argv[1])
    names = list(dict.fromkeys(row.name for rows in ROWS.values() for row in rows))
    cells = {(family, row.name): row for family, rows in ROWS.items() for row in rows}
    pools = {row.layout.size: Pool(row.layout.size) for row in cells.values()}
    told = {}
    for (family, name), row in track(cells.items(), "training"):
        told[family, name] = pools[row.layout.size].run(train, family, row)
    for pool in pools.values():
        pool.stop()
    lines = [HEAD, f"| layout | ranks | {' | '.join(ROWS)} |", f"| --- | ---: |{' --- |' * len(ROWS)}"]
    for name in names:
        row = next(row for rows in ROWS.values() for row in rows if row.name == name)
        results = [told.get((family, name)) for family in ROWS]
        lines.append(f"| {described(row)} | {row.layout.size} | {' | '.join(map(cell, results))} |")
    page.write_text("\n".join(lines) + "\n")


def described(row: Row) -> str:
    degrees = ", ".join(f"{name}={degree}" for name, degree in row.degrees)
    return f"{row.name} (`{degrees}`)"


def cell(told: list[dict] | None) -> str:
    if told is None:
        return ""
    sent: dict[str, int] = {}
    for (dimension, _), payload in told[0]["traffic"].items():
        sent[dimension] = sent.get(dimension, 0) + payload
    bytes_ = ", ".join(f"{dimension} {payload:,}" for dimension, payload in sent.items() if dimension != "world")
    return f"{max(each['gradient'] for each in told):.0e}<br>{bytes_}"


if __name__ == "__main__":
    main()
