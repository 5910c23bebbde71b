"""The line of each kind of row, and rows that are no JSON."""

from __future__ import annotations

import math

import pytest

from echelon.trace.units import show_bytes, show_clock, show_count
from echelon.train import rows
from echelon.train.line import describe

STEP = {
    "kind": "step",
    "step": 120,
    "loss": 2.34119,
    "lr": 3e-4,
    "norm": 1.0,
    "step_s": 0.1021,
    "tokens_s": 41234.0,
    "mfu": 0.381,
    "memory": 1.2e9,
    "exposed": 0.041,
    "wire": {},
}


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            STEP,
            "step 120/2000   loss 2.3412  lr 3.0e-04  41.2k tok/s  MFU 38.1 %  1.2 GB  exposed 4.1 %  ETA 3:12",
        ),
        (
            {name: of for name, of in STEP.items() if name != "tokens_s"} | {"images_s": 812.3, "loss": None},
            "step 120/2000   loss not finite  lr 3.0e-04  812 img/s  MFU 38.1 %  1.2 GB  exposed 4.1 %  ETA 3:12",
        ),
        ({"kind": "eval", "step": 5, "loss": 1.5}, "step 5/2000     held-out loss 1.5000"),
        (
            {"kind": "eval", "step": 2000, "loss": 1.5, "accuracy": 0.912},
            "step 2000/2000  held-out loss 1.5000  accuracy 91.2%",
        ),
        (
            {"kind": "save", "step": 2000, "stall_s": 0.0123, "interval_s": 9.0},
            "step 2000/2000  is being saved; training stood still for 12.3 ms",
        ),
        (
            {"kind": "start", "step": 0, "ranks": 1, "layout": "Layout(dp=1)"},
            "step 0/2000     begins on 1 rank: Layout(dp=1)",
        ),
        (
            {"kind": "start", "step": 80, "ranks": 4, "layout": "Layout(dp=4)"},
            "step 80/2000    resumed from step 80 on 4 ranks: Layout(dp=4)",
        ),
        ({"kind": "skip", "step": 3, "norm": None}, "step 3/2000     skipped: the gradients' norm was not finite"),
        ({"kind": "end", "step": 2000, "why": "done"}, "step 2000/2000  done"),
    ],
)
def test_lines(row, line):
    assert describe(row, 2000) == line


def test_units():
    assert [show_count(count) for count in (0.5, 999, 999.6, 1234, 5e9)] == ["0.5", "999", "1k", "1.23k", "5G"]
    assert [show_bytes(count) for count in (999, 999.6, 1.5e12)] == ["999 B", "1 KB", "1.5 TB"]
    assert [show_clock(seconds) for seconds in (0, 59.6, 3729)] == ["0:00", "1:00", "1:02:09"]


def test_rows_survive_what_is_no_number(tmp_path):
    file = tmp_path / rows.FILE
    file.write_text(rows.encode({"kind": "step", "step": 1, "loss": math.nan, "wire": {"dp": math.inf}}))
    assert rows.read(file) == [{"kind": "step", "step": 1, "loss": None, "wire": {"dp": None}}]


def test_cutting_keeps_a_step_and_what_was_before(tmp_path):
    file = tmp_path / rows.FILE
    file.write_text("".join(rows.encode({"kind": "step", "step": step}) for step in range(5)) + "{")
    rows.cut(file, 2)
    assert [row["step"] for row in rows.read(file)] == [0, 1, 2]
    assert list(tmp_path.iterdir()) == [file]


def test_a_run_without_rows(tmp_path):
    rows.cut(tmp_path / rows.FILE, 0)
    assert rows.read(tmp_path / rows.FILE) == []
