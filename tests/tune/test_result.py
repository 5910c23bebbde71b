"""From times to a table: the fastest road at each size, held on to within the noise; and the times on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from echelon.comm.routes import NoRoute, Road, Table
from echelon.tune.points import Point, Question
from echelon.tune.result import NOISE, Figure, Part, figures_of, steps_of, table_of
from echelon.tune.show import show

MPI, GLOO, RING = Road("mpi"), Road("gloo"), Road("mpi", "ring")
ABOUT = {"machine": {"processor": "some", "cores": 2, "mpi": "an MPI", "links": ""}, "ranks": 4, "nodes": 1}
ALL_REDUCE, GATHER = Question("all_reduce", 4, 1), Question("gather", 4, 1)


def figures(**medians: float) -> dict[Road, Figure]:
    return {Road.parse(name.replace("_", "+")): Figure(median, 0.01, 9) for name, median in medians.items()}


MEASURED = {
    Point(ALL_REDUCE, 64): figures(mpi=1.0, gloo=8.0),
    Point(ALL_REDUCE, 256): figures(mpi=2.0, mpi_ring=1.99),
    Point(ALL_REDUCE, 1024): figures(mpi=4.0, mpi_ring=2.0),
    Point(GATHER, 64): figures(mpi=1.0, gloo=1.1),
    Point(GATHER, 256): figures(mpi=9.0, gloo=2.0),
}


def test_the_road_changes_half_way_between_two_sizes_and_not_for_noise():
    table = table_of(MEASURED, ABOUT)
    sized, single = table.rules
    assert sized.steps == ((0, MPI), (512, RING))
    assert single.steps == ((0, GLOO),)  # the better one over all sizes
    assert figures_of(Table.from_text(table.to_text())) == MEASURED
    assert table.about["date"]


def test_what_may_be_chance_changes_nothing():
    """The same medians, with another spread."""
    sure, unsure = Figure(1.0, 0.1, 9), Figure(1.0, 2.0, 9)
    slower = Figure(1.3, 0.1, 9)
    assert sure.beats(slower)
    assert not unsure.beats(slower)
    assert not slower.beats(sure)
    assert steps_of({64: {MPI: slower, RING: sure}}) == ((0, RING),)
    assert steps_of({64: {MPI: slower, RING: unsure}}) == ((0, MPI),)


def test_what_is_faster_at_one_size_alone_changes_nothing():
    slow, fast = Figure(2.0, 0.0, 9), Figure(1.0, 0.0, 9)
    once = {64: {MPI: fast, RING: slow}, 256: {MPI: slow, RING: fast}, 1024: {MPI: fast, RING: slow}}
    assert steps_of(once) == ((0, MPI),)
    assert steps_of(once | {1024: {MPI: slow, RING: slow}}) == ((0, MPI), (128, RING))
    assert steps_of({size: once[size] for size in (64, 256)}) == ((0, MPI), (128, RING))  # the largest that there is


@given(st.dictionaries(st.integers(4, 2**24), st.tuples(*[st.floats(1e-6, 1.0)] * 3), min_size=1, max_size=12))
def test_a_road_is_left_only_for_a_faster_one(measured):
    roads = (MPI, GLOO, RING)
    by_size = {
        size: {road: Figure(time, 0.0, 9) for road, time in zip(roads, times, strict=True)}
        for size, times in measured.items()
    }
    steps = steps_of(by_size)
    starts = [start for start, _ in steps]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    last = MPI
    for size, found in sorted(by_size.items()):
        chosen = [road for start, road in steps if start <= size][-1]
        assert chosen == last or found[chosen].median * NOISE < found[last].median
        last = chosen


def test_an_interrupted_tuning_goes_on(tmp_path: Path):
    table = tmp_path / "new folder" / "routes.json"
    first = Part(table, ABOUT)
    points = list(MEASURED)
    first.add(points[0], MEASURED[points[0]])
    first.add(points[1], MEASURED[points[1]])
    text = first.path.read_text()
    first.path.write_text(text + text.splitlines()[1][:17])  # cut off in the middle of a line
    again = Part(table, ABOUT)
    assert again.figures == {point: MEASURED[point] for point in points[:2]}
    again.add(points[2], MEASURED[points[2]])
    assert list(Part(table, ABOUT).figures) == points[:3]


@pytest.mark.parametrize("begun", [json.dumps(ABOUT | {"ranks": 8}), "", "no JSON"])
def test_another_tuning_is_not_overwritten(tmp_path: Path, begun: str):
    part = tmp_path / "routes.json.part"
    part.write_text(begun + "\n")
    with pytest.raises(NoRoute, match="begun with other options, or on another machine"):
        Part(tmp_path / "routes.json", ABOUT)
    assert part.read_text() == begun + "\n"


def shown(table: Table, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(table, console)
    return console.export_text()


def test_a_table_is_drawn():
    text = shown(table_of(MEASURED, ABOUT))
    assert "some, 2 cores, an MPI, measured 2" in text
    assert "4 ranks on 1 node, cpu" in text
    [line] = [line.split() for line in text.splitlines() if line.startswith("all_reduce")]
    assert line == ["all_reduce", "M", "M", "Mr", "2.0×"]
    assert "whatever the size: gather gloo" in text
    assert "M mpi, Mr mpi+ring, G gloo" in text


def test_a_table_that_was_written_by_hand_is_drawn():
    text = shown(Table(table_of(MEASURED, ABOUT).rules))
    [line] = [line.split() for line in text.splitlines() if line.startswith("all_reduce")]
    assert line == ["all_reduce", "M", "Mr"]
