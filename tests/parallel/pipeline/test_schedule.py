"""Schedules as data: what is where, when a message begins, which weights are used; and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from echelon.parallel.pipeline.schedule import COMPUTATIONS, SCHEDULES, Action, Schedule, forward_only, make
from tests.parallel.pipeline.schedules import ONE_WAY, SYNCHRONOUS, schedules

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def written(schedule: Schedule) -> list[str]:
    """The computations of each rank; ' for a microbatch that goes up, a letter for the chunk."""

    def word(action: Action) -> str:
        chunk = "ab"[action.stage // schedule.ranks] if schedule.chunks > 1 else ""
        return f"{LETTERS[action.kind]}{action.microbatch}{chunk}{chr(39) if action.direction == 'up' else ''}"

    return [" ".join(word(action) for action in row if action.kind in COMPUTATIONS) for row in schedule.actions]


def computations(schedule: Schedule, rank: int) -> list[Action]:
    return [action for action in schedule.actions[rank] if action.kind in COMPUTATIONS]


PICTURES = {
    ("gpipe", 2, 3, 1): ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"],
    ("1f1b", 3, 4, 1): ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("interleaved", 2, 2, 2): ["F0a F1a F0b F1b B0b B1b B0a B1a", "F0a F1a F0b B0b F1b B1b B0a B1a"],
    ("zero-bubble", 2, 3, 1): ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"],
    ("gems", 2, 3, 1): ["F0 B0 F1' B1' F2 B2", "F0 B0 F1' B1' F2 B2"],
    ("gems-gpipe", 2, 4, 1): ["F0 F2 B0 B2 F1' F3' B1' B3'", "F0 F2 B0 B2 F1' F3' B1' B3'"],
    ("chimera", 4, 4, 1): [
        "F0 F2 F1' B1' F3' B3' B0 B2",
        "F0 F1' F2 F3' B1' B0 B3' B2",
        "F1' F0 F3' F2 B0 B1' B2 B3'",
        "F1' F3' F0 B0 F2 B2 B1' B3'",
    ],
}


@pytest.mark.parametrize("shape", PICTURES, ids=str)
def test_the_order_is_that_of_the_paper(shape):
    name, ranks, microbatches, chunks = shape
    assert written(make(name, ranks, microbatches, chunks=chunks)) == PICTURES[shape]


@given(schedules())
def test_a_stage_lies_where_its_actions_are(schedule):
    for rank, row in enumerate(schedule.actions):
        assert {schedule.rank_of(a.stage, a.direction) for a in row if a.stage >= 0} <= {rank}
        assert len(schedule.held(rank)) == schedule.chunks * len(schedule.directions)
    both = [place for rank in range(schedule.ranks) for place in schedule.held(rank)]
    assert len(both) == len(set(both)) == schedule.stages * len(schedule.directions)


@given(schedules())
def test_a_send_follows_its_computation_and_a_receive_is_one_computation_ahead(schedule):
    for row in schedule.actions:
        for place, action in enumerate(row):
            same = action.stage, action.microbatch, action.direction
            if action.kind == "send":
                before = row[place - 1]
                assert (before.stage, before.microbatch, before.direction) == same
                assert before.kind in (("forward",) if action.what == "activation" else ("backward", "backward_input"))
            if action.kind == "receive":
                kinds = ("forward",) if action.what == "activation" else ("backward", "backward_input")
                use = next(
                    i
                    for i, a in enumerate(row)
                    if a.kind in kinds and a.stage == action.stage and a.microbatch == action.microbatch
                )
                between = [a for a in row[place:use] if a.kind in COMPUTATIONS]
                first = not [a for a in row[:use] if a.kind in COMPUTATIONS]
                assert len(between) == (0 if first else 1)


@given(schedules())
def test_every_message_has_two_ends(schedule):
    ends = {"send": [], "receive": []}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in ends:
                other = schedule.peer(action)
                pair = (rank, other) if action.kind == "send" else (other, rank)
                ends[action.kind].append((action.what, action.microbatch, action.direction, pair))
    assert sorted(ends["send"]) == sorted(ends["receive"])
    assert all(pair[0] != pair[1] for *_, pair in ends["send"])


@given(schedules(tuple(SYNCHRONOUS)))
def test_a_synchronous_schedule_ends_with_the_only_update(schedule):
    for row in schedule.actions:
        last = schedule.microbatches - 1
        assert row[-2:] == (Action("reduce", microbatch=last), Action("step", microbatch=last, version=1))
        assert not [action for action in row[:-2] if action.kind in ("reduce", "step")]
        assert {action.version for action in row[:-1]} == {0}
    assert not schedule.is_versioned


def test_pipedream_uses_the_newest_weights_and_a_backward_those_of_its_forward():
    schedule = make("pipedream", 4, 8)
    assert schedule.is_versioned
    for rank, row in enumerate(schedule.actions):
        newest, stashed = 0, {}
        for action in row:
            if action.kind == "step":
                newest += 1
                assert action == Action("step", microbatch=newest - 1, version=newest)
            elif action.kind == "forward":
                assert action.version == newest == max(0, action.microbatch - (3 - rank))
                stashed[action.microbatch] = action.version
            elif action.kind == "backward":
                assert action.version == stashed[action.microbatch]
        assert newest == 8


def test_2bw_updates_after_as_many_microbatches_as_ranks_with_weights_one_update_old():
    schedule = make("pipedream-2bw", 4, 16)
    for rank, row in enumerate(schedule.actions):
        assert [(a.microbatch, a.version) for a in row if a.kind == "step"] == [(3, 1), (7, 2), (11, 3), (15, 4)]
        assert all(a.version == max(a.microbatch // 4 - 1, 0) for a in computations(schedule, rank))


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_schedule_says_of_itself(name):
    schedule = make(name, 4, 8, chunks=2 if name == "interleaved" else 1)
    assert schedule.is_bidirectional == (name not in ONE_WAY)
    assert schedule.is_versioned == (name not in SYNCHRONOUS)
    assert schedule.splits_backward == (name == "zero-bubble")
    assert not schedule.is_forward_only


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("pipedream", 4, 1), ("pipedream-2bw", 4, 4)])
def test_a_versioned_schedule_is_one_however_short_its_window(name, ranks, microbatches):
    schedule = make(name, ranks, microbatches)
    assert schedule.is_versioned
    assert [a.version for row in schedule.actions for a in row if a.kind == "step"] == [1] * ranks


@pytest.mark.parametrize("name", ["gems", "gems-gpipe", "chimera"])
def test_microbatches_are_dealt_to_the_directions_in_turn(name):
    schedule = make(name, 4, 5)
    ways = {action.microbatch: action.direction for action in computations(schedule, 1)}
    assert [ways[microbatch] for microbatch in range(5)] == ["down", "up", "down", "up", "down"]
    assert make(name, 4, 1).held(0) == ((0, "down"), (3, "up"))


@given(schedules())
def test_forward_only_is_the_forwards(schedule):
    forwards = forward_only(schedule)
    assert forwards.is_forward_only
    assert not forwards.is_versioned
    for rank in range(schedule.ranks):
        kept = [a for a in forwards.actions[rank] if a.kind == "forward"]
        assert [(a.stage, a.microbatch) for a in kept] == [
            (a.stage, a.microbatch) for a in schedule.actions[rank] if a.kind == "forward"
        ]
        assert {a.kind for a in forwards.actions[rank]} <= {"forward", "send", "receive"}
        assert {a.what for a in forwards.actions[rank]} <= {None, "activation"}
        assert {a.version for a in kept} == {0}


@pytest.mark.parametrize(
    ("arguments", "chunks", "says"),
    [
        (("gpip", 4, 8), 1, "there is no schedule 'gpip': there are gpipe, 1f1b, interleaved"),
        (("gpipe", 0, 8), 1, "gpipe with ranks=0: choose 1 or more"),
        (("gpipe", 4, 0), 1, "gpipe with microbatches=0: choose 1 or more"),
        (("chimera", 3, 8), 1, "an even number of ranks.* but has 3: choose 2 or 4, or a schedule of one direction"),
        (("chimera", 5, 8), 1, "an even number of ranks.* but has 5: choose 4 or 6"),
        (("chimera", 1, 8), 1, "an even number of ranks.* but has 1: choose 2 or 4"),
        (("interleaved", 4, 8), 1, "choose chunks=2 or more, or 1f1b"),
        (("interleaved", 4, 8), 0, "interleaved with chunks=0: choose 1 or more"),
        (("interleaved", 4, 6), 2, "a multiple of 4 microbatches.* but has 6: choose 4 or 8"),
        (("interleaved", 4, 3), 2, "a multiple of 4 microbatches.* but has 3: choose 4$"),
        (("pipedream-2bw", 4, 3), 1, "a multiple of 4 microbatches.* but has 3: choose 4$"),
        (("1f1b", 4, 8), 2, "1f1b has one stage a rank, but chunks=2: leave chunks out, or choose interleaved"),
    ],
)
def test_bad_input_is_told_what_would_do(arguments, chunks, says):
    with pytest.raises(ValueError, match=says):
        make(*arguments, chunks=chunks)


def test_rows_are_one_a_rank():
    with pytest.raises(ValueError, match=re.escape("mine has 2 ranks, but rows of actions for 1")):
        Schedule("mine", 2, 2, 1, ((),))
