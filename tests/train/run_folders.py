"""Folders of runs, made by hand: what a run of two ranks writes, as far as a test wants it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from echelon.comm.records import Record, RecordWriter
from echelon.train import rows

MS = 10**6
CONFIG = '[model]\nname = "gpt2"\n\n[train]\nsteps = 100\nbatch = 8\nlog_every = 10\n\n[optimizer]\nlr = {lr}\n'
KINDS = {"parameters": 400, "gradients": 400, "optimizer": 800, "host": 0, "rest": 2000}


def step_row(step: int, **more: Any) -> rows.Row:
    row = {"kind": "step", "step": step, "time": 1e9 + step, "loss": 5 - step / 50, "lr": 1e-3, "norm": 1.0}
    row |= {"step_s": 0.5, "tokens_s": 1000.0 + step, "mfu": 0.25, "memory": 10**9, "exposed": 0.1, "wire": {"dp": 7}}
    return row | more


def start_row(step: int = 0, **more: Any) -> rows.Row:
    row = {"kind": "start", "step": step, "time": 1e9 + step, "ranks": 2, "layout": "Layout(dp=2)"}
    return row | {"drawing": "Layout(dp=2): 2 ranks\n\n  <grid>", "parameters": 124_000_000, "device": "H200"} | more


def whole_run() -> list[rows.Row]:
    made = [start_row(), *(step_row(step) for step in range(10, 60, 10)), start_row(50, time=1e9 + 100)]
    made += [step_row(step, time=1e9 + 50 + step) for step in range(60, 101, 10)]
    made += [{"kind": "eval", "step": step, "time": 1e9, "loss": 4 - step / 50} for step in (50, 100)]
    made.append({"kind": "save", "step": 50, "time": 1e9, "stall_s": 0.01, "interval_s": 10.0})
    return [*made, {"kind": "end", "step": 100, "time": 1e9 + 151, "why": "done"}]


def make(folder: Path, told: list[rows.Row], *, lr: float = 1e-3, memory: bool = False, record: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(lr=lr))
    (folder / rows.FILE).write_text("".join(map(rows.encode, told)))
    if memory:
        both = {"measured": KINDS, "predicted": KINDS | {"gradients": 200}}
        (folder / "memory.json").write_text(json.dumps({"rank 0": both, "largest": both}))
    if record:
        for rank in range(2):
            write_record(folder / "record", rank)
    return folder


def write_record(folder: Path, rank: int) -> None:
    """Three steps of 10, 12 and 20 ms; in each, two operations of tp and one of dp."""
    writer, moment = RecordWriter(folder, rank, 2), 1000 * MS
    writer.steps.append(moment)
    for length in (10, 12, 20):
        for dimension, begin in (("tp", 1), ("tp", 3), ("dp", 5)):
            made = Record("all_reduce", dimension, dimension, (0, 1), "float32", 4096, moment + begin * MS, wire=4096)
            made.started, made.ended, made.blocked = made.enqueued, made.enqueued + MS, MS // 2
            writer.append(made)
        moment += length * MS
        writer.steps.append(moment)
    writer.close()
