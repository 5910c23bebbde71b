"""`echelon runs`: the list, the comparison, and errors that say what there is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from echelon.train import rows
from echelon.train.compare import differences, figures
from echelon.train.run_folder import open_run
from echelon.train.runs import runs_app
from tests.train.run_folders import make, start_row, step_row, whole_run
from tests.train.test_report import Page


def call(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(runs_app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def two(tmp_path):
    make(tmp_path / "runs" / "first", whole_run())
    make(tmp_path / "runs" / "second", [start_row(time=5e8), step_row(10, loss=1.5)], lr=0.5)
    return tmp_path / "runs"


def test_the_list(two):
    (two / "not a run").mkdir()
    lines = call("--dir", two).splitlines()
    second, first = (next(line for line in lines if name in line) for name in ("second", "first"))
    assert lines.index(second) < lines.index(first)  # by when they began
    for cell in ("first", "gpt2", "dp=2", " 2 ", "100/100", "3.0000", "1.06k", "25.0%", "done"):
        assert cell in first
    assert "10/100" in second
    assert "not a run" not in "".join(lines)


def test_where_there_are_none(tmp_path):
    assert "there are no runs" in call("--dir", tmp_path, code=1)


@pytest.mark.parametrize(
    ("told", "age", "state"),
    [
        ([start_row(), {"kind": "end", "step": 9, "why": "stopped"}], 0, "stopped"),
        ([start_row(), {"kind": "end", "step": 9, "why": "stopped"}, start_row(9)], 0, "running"),
        ([start_row(), step_row(10)], 100, "running"),  # a row comes every five seconds, and nothing for ten of them
        ([start_row(), step_row(10)], 200, "failed"),
        ([start_row()], 61, "failed"),
        ([], 61, "failed"),
        ([], 0, "running"),
    ],
)
def test_states(tmp_path, told, age, state):
    folder = make(tmp_path / "run", told)
    file = folder / rows.FILE
    os.utime(file, (file.stat().st_mtime - age,) * 2)
    assert open_run(folder).state == state


def test_compare(two, tmp_path):
    page = tmp_path / "compare.html"
    output = call("--dir", two, "compare", "first", two / "second", "--out", page)
    assert "optimizer.lr" in output
    assert "train.batch" not in output  # which is the same
    assert str(page) in output
    made = Page(page.read_text())
    for section in ("Loss, by step", "Loss, by tokens", "Loss, by time", "Throughput, by step"):
        assert made.curves(section) == [10, 1]
    assert made.curves("Held-out loss, by step") == [2]
    assert "0.5" in made.words["Settings that differ"]


def test_what_is_compared(two):
    both = [open_run(two / name) for name in ("first", "second")]
    assert differences(both) == {"optimizer.lr": ["0.001", "0.5"]}
    assert differences([both[0], both[0]]) == {}
    told = figures(both)
    assert (told["loss"], told["tokens/s"]) == (["3.0000", "1.5000"], ["1.06k", "1.01k"])
    assert "energy" not in told


def test_the_time_between_two_jobs_does_not_count(tmp_path):
    told = [start_row(time=0.0), step_row(10, time=10.0), start_row(10, time=1000.0), step_row(20, time=1005.0)]
    assert open_run(make(tmp_path / "run", told)).seconds == 15


@pytest.mark.parametrize("name", ["frist", "/nowhere"])
def test_a_run_that_is_not_there(two, name):
    output = call("--dir", two, "compare", "first", name, code=1)
    assert name in output
    assert "first, second" in output


def test_one_run_cannot_be_compared(two):
    assert "two runs or more" in call("--dir", two, "compare", "first", code=1)


def test_report(two):
    assert call("--dir", two, "report", "first").strip() == str(two / "first" / "report.html")
    assert (two / "first" / "report.html").stat().st_size > 10_000


def test_listing_does_not_wait_for_pytorch():
    code = "import sys; import echelon.train.runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
