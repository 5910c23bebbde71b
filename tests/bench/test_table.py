"""The output of every benchmark, column by column: where OMB has a figure, there is ours."""

from __future__ import annotations

import re

import pytest

import echelon
from echelon.bench.catalogue import BENCHMARKS
from echelon.bench.options import Options
from tests.bench.world import printed

LATENCY = ["Avg Latency(us)"]
TITLES = {
    "latency": (LATENCY, [*LATENCY, "Min Latency(us)", "Max Latency(us)", "Iterations"]),
    "bandwidth": (["Bandwidth (MB/s)"],) * 2,
    "rate": (["MB/s", "Messages/s"],) * 2,
    "overlap": (
        ["Overall(us)", "Compute(us)", "Pure Comm.(us)", "Overlap(%)"],
        [
            "Overall(us)",
            "Compute(us)",
            "Coll. Init(us)",
            "MPI_Test(us)",
            "MPI_Wait(us)",
            "Pure Comm.(us)",
            "Min Comm.(us)",
            "Max Comm.(us)",
            "Overlap(%)",
        ],
    ),
}


def output(ranks, name, size=2, **wanted):
    texts = ranks(size, printed, Options(name, 8, 64, 2, 1, **wanted).to_text())
    assert [failed for _, failed in texts] == [False] * size
    assert all(text == "" for text, _ in texts[1:]), "only rank 0 prints"
    return texts[0][0].splitlines()


def columns(line: str, widths: list[int]) -> list[str]:
    assert len(line) == sum(widths)
    cells = []
    for width in widths:
        cells.append(line[:width].strip())
        line = line[width:]
    return cells


@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_columns(ranks, name, full):
    benchmark = BENCHMARKS[name]
    titles = TITLES[benchmark.columns][full]
    lines = output(ranks, name, full=full)
    words = [line for line in lines if line.startswith("#") or not line]
    figures = lines[len(words) :]
    assert words[-1].startswith("# ")
    widths = [12 if title == "Iterations" else 18 for title in titles]
    if benchmark.sized:
        assert columns(words[-1], [10, *widths]) == ["# Size", *titles]
        assert [int(columns(line, [10, *widths])[0]) for line in figures] == [8, 16, 32, 64]
        cells = [columns(line, [10, *widths])[1:] for line in figures]
    else:
        widths[0] = len(f"# {titles[0]}")
        assert columns(words[-1], widths) == [f"# {titles[0]}", *titles[1:]]
        cells = [columns(line, widths) for line in figures]
        assert len(cells) == 1
    for row in cells:
        for title, cell in zip(titles, row, strict=True):
            assert re.fullmatch(r"2" if title == "Iterations" else r"\d+\.\d\d", cell), f"{title}: {cell}"
            assert float(cell) > 0 or title in ("Overlap(%)", "MPI_Test(us)", "MB/s", "Bandwidth (MB/s)")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("latency", ["", "# Echelon MPI Latency Test v{}", "# Datatype: MPI_CHAR."]),
        ("allreduce", ["", "# Echelon MPI Allreduce Latency Test v{}", "# Datatype: MPI_FLOAT."]),
        ("barrier", ["", "# Echelon MPI Barrier Latency Test v{}"]),
        (
            "ialltoall",
            [
                "",
                "# Echelon MPI Non-blocking All-to-All Latency Test v{}",
                "# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait",
                "",
                "# Datatype: MPI_CHAR.",
            ],
        ),
        (
            "mbw_mr",
            [
                "# Echelon MPI Multiple Bandwidth / Message Rate Test v{}",
                "# [ pairs: 1 ] [ window size: 64 ]",
                "# Datatype: MPI_CHAR.",
            ],
        ),
    ],
)
def test_header(ranks, name, first):
    lines = output(ranks, name)
    assert lines[: len(first)] == [line.format(echelon.__version__) for line in first]
    assert lines[len(first)].startswith("# ")


def test_validation_adds_a_column(ranks):
    lines = output(ranks, "bcast", validate=True)
    assert columns(lines[-5], [10, 18, 18])[2] == "Validation"
    assert [columns(line, [10, 18, 18])[2] for line in lines[-4:]] == ["Pass"] * 4


def test_contenders_stand_side_by_side(ranks):
    lines = output(ranks, "allgather", validate=True, transports=("mpi", "gloo", "raw"))
    titles = ["# Size", "mpi Avg(us)", "gloo Avg(us)", "raw Avg(us)", "mpi valid", "gloo valid", "raw valid"]
    assert columns(lines[-5], [10] + [18] * 6) == titles
    assert all(columns(line, [10] + [18] * 6)[4:] == ["Pass"] * 3 for line in lines[-4:])
    assert "# raw: torch buffers through mpi4py alone." in lines


def test_a_long_name_widens_its_columns(ranks):
    lines = output(ranks, "ibcast", transports=("mpi", "gloo"), buffers=("torch", "tests.bench.arrays:bare"))
    titles = lines[-5]
    assert "gloo/tests.bench.arrays Overlap(%)" in titles
    assert {len(line) for line in lines[-4:]} == {len(titles)}


def test_a_line_as_a_script_reads_it(ranks):
    """Skip what begins with #, split the rest at spaces."""
    rows = [line.split() for line in output(ranks, "allreduce", full=True) if line and not line.startswith("#")]
    assert [len(row) for row in rows] == [5] * 4
    assert all(float(row[2]) <= float(row[1]) <= float(row[3]) for row in rows)
