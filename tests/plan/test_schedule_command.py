"""`echelon plan schedule`: the drawing and the figures, pictures, and what it says to bad input."""

from __future__ import annotations

import re
import sys

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.parallel.pipeline.schedule import SCHEDULES
from tests.launch.jobs import echelon as command


def call(*arguments: object):
    return CliRunner().invoke(app, ["plan", "schedule", *map(str, arguments)], env={"COLUMNS": "80"})


def figures(output: str) -> dict[str, list[str]]:
    """The rows of the table, by what they are about."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0] in ("makespan", "bubble", "activations", "weights")}


def test_the_command_draws_and_tells():
    job = command("plan", "schedule", "chimera", "--stages", 4, "--microbatches", 8)
    assert job.returncode == 0, job.stderr
    assert job.stdout.startswith("chimera: 4 ranks, 8 microbatches\n\nrank 0  F0F2  f1b1──f3b3──")
    assert figures(job.stdout) == {
        "makespan": ["30"],
        "bubble": ["20.0%", "11.1%", "(D−2)/(2N+D−2)", "backward = forward, D | N"],
        "activations": ["3 4 4 3", "3 … 4", "D/2+1 … D", "N ≥ D"],
        "weights": ["2 2 2 2", "2", "2"],
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_fits_into_80_columns(name):
    output = call(name).output
    assert len(figures(output)) == 4
    assert max(map(len, output.splitlines())) <= 80


def test_costs_are_of_a_rank_s_share():
    """So the figures of a schedule with chunks stand beside those of one without."""
    costs = ("--forward", 2, "--backward-input", 1.5, "--backward-weight", 0.5)
    assert figures(call("1f1b", *costs).output)["makespan"] == ["44"]
    assert figures(call("interleaved", *costs, "--chunks", 4).output)["makespan"] == ["35"]


def test_latency_is_told_beside_the_closed_form():
    bubble = figures(call("gpipe", "--latency", 0.5).output)["bubble"]
    assert bubble == ["33.3%", "27.3%", "(D−1)/(N+D−1)", "no latency"]


@pytest.mark.parametrize(("suffix", "begins"), [("svg", b"<svg "), ("png", b"\x89PNG")])
def test_pictures(tmp_path, suffix, begins):
    file = tmp_path / f"x.{suffix}"
    assert call("zero-bubble", "-o", file).exit_code == 0
    assert file.read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("chimaera",), "there is no schedule 'chimaera': there are gpipe, 1f1b"),
        (("chimera", "--stages", 3), "needs an even number of ranks"),
        (("gpipe", "--microbatches", 0), "gpipe with microbatches=0: choose 1 or more"),
        (("interleaved", "--chunks", 1), "interleaved has several chunks a rank: choose chunks=2 or more"),
        (("interleaved", "--microbatches", 6), "needs a multiple of 4 microbatches"),
        (("1f1b", "--chunks", 2), "1f1b has one stage a rank, but chunks=2"),
        (("1f1b", "--forward", -1), "forward costs -1.0: choose 0 or more"),
        (("1f1b", "--latency", "nan"), "latency costs nan: choose 0 or more"),
        (("1f1b", "--stages", "four"), "Invalid value for '--stages'"),
        (
            ("1f1b", "-o", "x.pdf"),
            "x.pdf is no picture that can be drawn here: choose a name that ends in .svg or .png",
        ),
        (("1f1b", "-o", "no/folder/x.svg"), "no/folder/x.svg cannot be written: No such file or directory"),
        (("1f1b", "-o", "no/folder/x.png"), "no/folder/x.png cannot be written: No such file or directory"),
    ],
)
def test_bad_input_is_refused(arguments, says):
    refused = call(*arguments)
    assert refused.exit_code == 2
    assert says in " ".join(refused.output.split())


def test_without_matplotlib_a_png_is_refused_and_an_svg_drawn(tmp_path, monkeypatch):
    for name in [module for module in sys.modules if module.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = call("1f1b", "-o", tmp_path / "x.png")
    assert refused.exit_code == 1
    assert "a .png needs matplotlib" in refused.output
    assert call("1f1b", "-o", tmp_path / "x.svg").exit_code == 0
