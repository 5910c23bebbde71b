"""Drawings: every computation is there once, in its row and at its time, whatever the schedule and the width."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.pipeline.draw import Box, picture, png, svg
from echelon.parallel.pipeline.schedule import COMPUTATIONS, SCHEDULES, forward_only, make
from echelon.parallel.pipeline.simulate import Costs, simulate
from echelon.parallel.pipeline.terminal import terminal
from tests.parallel.pipeline.schedules import schedules

COSTS = Costs(forward=1, backward_input=1, backward_weight=1)
RECT = "{http://www.w3.org/2000/svg}rect"
TEXT = "{http://www.w3.org/2000/svg}text"


def boxes(drawn):
    """Those of computations, by their row; they are what has a tooltip and the height of a row."""
    titled = [shape for shape in drawn.shapes if isinstance(shape, Box) and shape.title]
    height = min(box.height for box in titled)
    rows = itertools.groupby((box for box in titled if box.height == height), key=lambda box: box.y)
    return [list(row) for _, row in rows]


@given(schedules())
def test_a_picture_has_a_box_for_each_computation_and_no_two_overlap(schedule):
    drawn = picture(simulate(schedule, COSTS))
    rows = boxes(drawn)
    assert [len(row) for row in rows] == [sum(a.kind in COMPUTATIONS for a in row) for row in schedule.actions]
    for row in rows:
        assert all(one.x + one.width <= two.x for one, two in itertools.pairwise(row))
        assert 0 < row[0].x < row[-1].x + row[-1].width < drawn.width


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_is_a_picture_with_numbers_tooltips_and_a_background(name):
    schedule = make(name, 4, 8, chunks=2 if name == "interleaved" else 1)
    root = ElementTree.fromstring(svg(simulate(schedule, COSTS)))
    first = root.find(RECT)
    assert (first.get("width"), first.get("height"), first.get("fill")) == (
        root.get("width"),
        root.get("height"),
        "#ffffff",
    )
    texts = [element.text for element in root.iter(TEXT)]
    assert name in texts
    assert {"rank 0", "rank 3", "forward", "bubble", "update"} <= set(texts)
    computed = sum(action.kind in COMPUTATIONS for row in schedule.actions for action in row)
    in_boxes = [e for e in root.iter(TEXT) if e.get("text-anchor") == "middle" and e.get("fill") != "#666666"]
    assert len(in_boxes) == computed
    titles = [element[0].text for element in root.iter(RECT) if len(element)]
    assert "forward of microbatch 0 at stage 0 (down): 0 to 1" in [title.partition(", with")[0] for title in titles]


def test_of_versioned_schedules_the_tooltip_tells_the_version():
    assert "stage 0 (down): 12 to 13, with version 1 of the weights" in svg(simulate(make("pipedream", 4, 8), COSTS))


def test_directions_and_chunks_differ_in_shade():
    for name, chunks, shades in (("1f1b", 1, 2), ("chimera", 1, 4), ("interleaved", 3, 6)):
        drawn = picture(simulate(make(name, 4, 8, chunks=chunks), COSTS))
        assert len({box.colour for row in boxes(drawn) for box in row}) == shades, name


def test_png(tmp_path):
    file = tmp_path / "x.png"
    png(simulate(make("chimera", 4, 8), COSTS), file)
    assert file.read_bytes().startswith(b"\x89PNG")


@given(schedules(), st.integers(30, 200), st.booleans(), st.booleans())
def test_the_terminal_s_lines_fit(schedule, width, colour, whole):
    timeline = simulate(schedule if whole else forward_only(schedule), COSTS)
    lines = terminal(timeline, width, colour=colour).plain.split("\n")
    assert len(lines) == schedule.ranks + 2
    assert max(map(len, lines[:-1])) <= width
    assert [line.split()[:2] for line in lines[:-2]] == [["rank", str(rank)] for rank in range(schedule.ranks)]


@given(schedules(), st.booleans())
def test_where_there_is_room_the_terminal_shows_every_microbatch(schedule, colour):
    timeline = simulate(schedule, COSTS)
    lines = terminal(timeline, 5000, colour=colour).plain.split("\n")
    for line, row in zip(lines, schedule.actions, strict=False):
        numbers = "".join(letter if letter.isdigit() else " " for letter in line).split()[1:]
        assert numbers == [str(action.microbatch) for action in row if action.kind in COMPUTATIONS]


def test_the_terminal_without_colours():
    timeline = simulate(make("gems", 2, 2), COSTS)
    assert terminal(timeline, 80, colour=False).plain.split("\n") == [
        "rank 0  F0──            B0──────f1──b1──────",
        "rank 1      F0──B0──────f1──                b1──────",
        "        0                                         11",
        "        F forward   B backward   lower case: up, from the last rank",
    ]


def test_what_takes_no_time_is_drawn_too():
    timeline = simulate(make("1f1b", 2, 2), Costs(0, 0, 0))
    assert ElementTree.fromstring(svg(timeline)).tag.endswith("svg")
    assert terminal(timeline).plain.startswith("rank 0")
