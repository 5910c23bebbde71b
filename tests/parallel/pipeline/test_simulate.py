"""The simulator: figures equal the closed forms, each with the costs its form assumes; what cannot run is refused.

Closed forms have D stages, N microbatches and v chunks; messages, reduces and updates cost nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.pipeline.schedule import BACKWARDS, Action, Schedule, forward_only, make
from echelon.parallel.pipeline.simulate import Costs, ScheduleError, Timeline, simulate
from tests.parallel.pipeline.schedules import schedules

EQUAL = Costs(forward=2, backward_input=1, backward_weight=1)  # backward = forward
DOUBLE = Costs(forward=1, backward_input=1, backward_weight=1)  # backward = 2 × forward, and F = B = W
ANY = [EQUAL, DOUBLE, Costs(forward=3, backward_input=1, backward_weight=1)]
GRID = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 12, 16)))
GROWING = (8, 64, 400)  # microbatches, where a form is a limit


def of(name: str, ranks: int, microbatches: int, costs: Costs = DOUBLE, chunks: int = 1) -> Timeline:
    return simulate(make(name, ranks, microbatches, chunks=chunks), costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name):
    """(D−1)/(N+D−1), whatever forward and backward cost."""
    for (ranks, microbatches), costs in itertools.product(GRID, ANY):
        expected = Fraction(ranks - 1, microbatches + ranks - 1)
        assert of(name, ranks, microbatches, costs).bubble == pytest.approx(float(expected)), (ranks, microbatches)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_bubble_of_interleaved(chunks):
    """(D−1)/(vN+D−1), whatever forward and backward cost; D divides N."""
    for ranks, batches, costs in itertools.product((1, 2, 3, 4, 8), (1, 2, 3), ANY):
        microbatches = ranks * batches
        expected = Fraction(ranks - 1, chunks * microbatches + ranks - 1)
        bubble = of("interleaved", ranks, microbatches, costs, chunks).bubble
        assert bubble == pytest.approx(float(expected)), (ranks, microbatches)


def test_bubble_of_zero_bubble():
    """In time a third of 1F1B's, with F = B = W and N ≥ D. As a ratio a third in the limit of many microbatches."""
    for ranks, microbatches in GRID:
        if microbatches >= ranks:
            split, whole = (of(name, ranks, microbatches) for name in ("zero-bubble", "1f1b"))
            assert 3 * split.bubble * split.makespan == pytest.approx(whole.bubble * whole.makespan)
            assert split.bubble == pytest.approx((ranks - 1) / (3 * microbatches + ranks - 1))
    for ranks, microbatches in itertools.product((2, 4), GROWING):
        ratio = of("zero-bubble", ranks, microbatches).bubble / of("1f1b", ranks, microbatches).bubble
        assert 0 < ratio - 1 / 3 < ranks / (3 * microbatches)


def test_bubble_of_gems():
    """(D−1)/(D+½) with backward = 2 × forward, (D−1)/(D+1) with equal costs: both are limits of many microbatches, from
    above, for the first one fills the pipe and the last one drains it.
    """
    for ranks in (2, 4, 8):
        for microbatches in GROWING:
            assert 0 < of("gems", ranks, microbatches, DOUBLE).bubble - (ranks - 1) / (ranks + 0.5) < 1 / microbatches
            assert 0 < of("gems", ranks, microbatches, EQUAL).bubble - (ranks - 1) / (ranks + 1) < 1 / microbatches
        for microbatches in (1, 2, 5, 8):
            assert of("gems", ranks, microbatches, DOUBLE).makespan == microbatches * (2 * ranks + 1) + ranks - 1
            assert of("gems", ranks, microbatches, EQUAL).makespan == 2 * (microbatches * (ranks + 1) + ranks - 1)


def test_bubble_of_chimera():
    """(D−2)/(2N+D−2) with equal costs, where D divides N."""
    for ranks, batches in itertools.product((2, 4, 6, 8), (1, 2, 3, 5)):
        microbatches = ranks * batches
        expected = Fraction(ranks - 2, 2 * microbatches + ranks - 2)
        bubble = of("chimera", ranks, microbatches, EQUAL).bubble
        assert bubble == pytest.approx(float(expected)), (ranks, microbatches)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_bubble_of_pipedream(name):
    """≈ 0: what is left is the pipe that fills and drains once, (D−1)/(N+D−1) of a window of N microbatches."""
    for ranks, batches, costs in itertools.product((1, 2, 4, 8), (1, 2, 5), ANY):
        microbatches = ranks * batches
        bubble = of(name, ranks, microbatches, costs).bubble
        assert bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1)), (ranks, microbatches)
    assert of(name, 4, GROWING[-1]).bubble < 1e-2


def test_activations():
    """Of one microbatch each: N for GPipe; D on the first rank to 1 on the last for 1F1B and PipeDream; 1 for GEMS."""
    for ranks, microbatches in GRID:
        falling = tuple(min(ranks - rank, microbatches) for rank in range(ranks))
        assert of("gpipe", ranks, microbatches).activations == (microbatches,) * ranks
        assert of("1f1b", ranks, microbatches).activations == falling
        assert of("pipedream", ranks, microbatches).activations == falling
        if microbatches % ranks == 0:
            assert of("pipedream-2bw", ranks, microbatches).activations == falling
        if ranks % 2 == 0:
            assert of("gems", ranks, microbatches).activations == (1,) * ranks


def test_activations_of_zero_bubble():
    """As 1F1B's first rank, on every rank: the part for weights is put off where there is room."""
    for ranks, microbatches in GRID:
        peak = max(of("1f1b", ranks, microbatches).activations)
        assert of("zero-bubble", ranks, microbatches).activations == (peak,) * ranks


def test_activations_of_chimera():
    """D/2+1 on the outer ranks to D on the inner ones, if N ≥ D; never more than D."""
    for ranks, microbatches in GRID:
        if ranks % 2 == 0:
            got = of("chimera", ranks, microbatches).activations
            assert max(got) <= ranks
            if microbatches >= ranks:
                rising = [ranks // 2 + 1 + rank for rank in range(ranks // 2)]
                assert got == (*rising, *reversed(rising)), (ranks, microbatches)


def test_activations_of_interleaved():
    """A little more than 1F1B: D · (1 + (D−1)/(vD)) of a rank's share on the first rank, if N ≥ 2D."""
    for ranks, batches, chunks in itertools.product((1, 2, 4, 8), (2, 3), (2, 3, 4)):
        timeline = of("interleaved", ranks, ranks * batches, chunks=chunks)
        assert timeline.activations[0] == chunks * ranks + ranks - 1
        assert max(timeline.activations) == timeline.activations[0]


def test_weights():
    """One copy of a rank's stages where all is synchronous, two where there are two directions."""
    for ranks, microbatches in GRID:
        for name in ("gpipe", "1f1b", "zero-bubble", *(("gems", "chimera") if ranks % 2 == 0 else ())):
            copies = 2 if name in ("gems", "chimera") else 1
            assert of(name, ranks, microbatches).weights == (copies,) * ranks
    assert of("interleaved", 4, 8, chunks=3).weights == (3, 3, 3, 3)  # of stages of a third
    assert of("gems", 3, 8).weights == of("gems-gpipe", 3, 8).weights == (2, 1, 2)  # that in the middle is one


def test_weights_of_versioned_schedules():
    """PipeDream: D versions on the first rank to 1 on the last, from N ≥ 2D − 1. 2BW: two, from the second batch."""
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in (2 * ranks - 1, 3 * ranks, 24):
            assert of("pipedream", ranks, microbatches).weights == tuple(range(ranks, 0, -1))
        for batches in (2, 3, 5):
            assert of("pipedream-2bw", ranks, ranks * batches).weights == (2,) * ranks


def test_messages_cost_latency_and_bytes():
    free, far = (simulate(make("gpipe", 4, 1), replace(DOUBLE, latency=late)) for late in (0, 0.5))
    assert far.makespan - free.makespan == 6 * 0.5
    wide = simulate(make("gpipe", 4, 1), replace(DOUBLE, latency=0.25, activation_bytes=8, bandwidth=32))
    assert wide.makespan == far.makespan


def test_messages_travel_while_ranks_compute():
    """With two chunks and many microbatches, a message has its time before it is needed."""
    free, far = (
        simulate(make("interleaved", 4, 64, chunks=2), replace(DOUBLE, latency=late)).makespan for late in (0, 0.25)
    )
    assert far / free < 1.05


def test_a_receive_that_begins_late_delays_its_message():
    schedule = make("1f1b", 2, 2)
    row = list(schedule.actions[1])
    late = next(action for action in row if action.kind == "receive" and action.microbatch == 1)
    row.remove(late)
    row.insert(row.index(Action("forward", 1, 1)), late)
    costs = Costs(forward=2, backward_input=1, backward_weight=1, latency=1)
    changed = simulate(replace(schedule, actions=(schedule.actions[0], tuple(row))), costs)
    assert changed.makespan == simulate(schedule, costs).makespan + 1


def test_costs_by_stage_and_of_updates():
    costs = Costs(forward=[1, 2, 3], backward_input=1, backward_weight=[0, 0, 4], reduce=5, step=7)
    timeline = simulate(make("gpipe", 3, 1), costs)
    assert timeline.makespan == 1 + 2 + 3 + (1 + 4) + 1 + 1 + 5 + 7
    assert [span.action.kind for span in timeline.spans[2]] == ["forward", "backward", "reduce", "step"]
    assert [span.start for span in timeline.spans[2]] == [3, 6, 11, 16]


def test_ranks_that_hold_the_same_stages_reduce_together():
    timeline = simulate(make("chimera", 4, 1), replace(DOUBLE, reduce=1))
    starts = [next(span.start for span in row if span.action.kind == "reduce") for row in timeline.spans]
    assert starts[0] == starts[3] == 12
    assert starts[1] == starts[2] == 10


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (Costs(forward=[1, 2]), "1f1b has 4 stages, but forward has 2 costs: give one for each"),
        (Costs(backward_input=-1), "backward_input costs -1: choose 0 or more"),
        (Costs(backward_weight=[0, 0, 0, -1]), r"backward_weight costs \[0, 0, 0, -1\]: choose 0 or more"),
        (Costs(latency=-1), "latency costs -1: choose 0 or more"),
        (Costs(activation_bytes=8, bandwidth=0), "a bandwidth of 0 carries nothing: choose more than 0"),
        (Costs(forward=float("nan")), "forward costs nan"),
    ],
)
def test_bad_costs_are_refused(costs, says):
    with pytest.raises(ValueError, match=says):
        simulate(make("1f1b", 4, 8), costs)


cost = st.integers(1, 5).map(float)


@given(schedules(), st.builds(Costs, cost, cost, cost, latency=cost, reduce=cost, step=cost))
def test_every_schedule_runs_to_its_end_in_order(schedule, costs):
    timeline = simulate(schedule, costs)
    for row, spans in zip(schedule.actions, timeline.spans, strict=True):
        assert [span.action for span in spans] == [a for a in row if a.kind not in ("send", "receive")]
        assert all(before.end <= after.start for before, after in itertools.pairwise(spans))
    assert dependencies_hold(timeline, costs)
    assert 0 <= timeline.bubble < 1


@given(schedules())
def test_forwards_alone_run_too(schedule):
    timeline = simulate(forward_only(schedule), DOUBLE)
    assert timeline.activations == (1,) * schedule.ranks
    held = [schedule.held(rank) for rank in range(schedule.ranks)]
    assert timeline.weights == tuple(len({stage for stage, _ in each}) for each in held)


def dependencies_hold(timeline: Timeline, costs: Costs) -> bool:
    """By the times alone: every forward and backward begins after what it needs has come."""
    ends = {}
    for row in timeline.spans:
        for span in row:
            kind = "backward" if span.action.kind == "backward_input" else span.action.kind
            ends[kind, span.action.stage, span.action.microbatch] = span.start, span.end
    schedule, good = timeline.schedule, True
    for (kind, stage, microbatch), (start, _) in ends.items():
        before = {"forward": ("forward", stage - 1), "backward": ("backward", stage + 1)}.get(kind)
        if before and (*before, microbatch) in ends:
            way = schedule.direction_of(microbatch)
            apart = schedule.rank_of(stage, way) != schedule.rank_of(before[1], way)
            good &= start >= ends[*before, microbatch][1] + (costs.message if apart else 0)
        if kind == "backward":
            good &= start >= ends["forward", stage, microbatch][1]
        if kind == "backward_weight":
            good &= start >= ends["backward", stage, microbatch][1]
    return good


def changed(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return replace(schedule, actions=tuple(rows))


@given(schedules(), st.data())
def test_a_schedule_that_misses_an_action_is_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    dropped = row.pop(data.draw(st.integers(0, len(row) - 1)))
    with pytest.raises(ScheduleError) as refusal:
        simulate(changed(schedule, rank, row), DOUBLE)
    assert refusal.value.rank == rank, dropped


@given(schedules(), st.data())
def test_a_schedule_that_repeats_an_action_is_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    first = data.draw(st.integers(0, len(row) - 1))
    again = data.draw(st.integers(first + 1, len(row)))
    row.insert(again, row[first])
    with pytest.raises(ScheduleError) as refusal:
        simulate(changed(schedule, rank, row), DOUBLE)
    assert (refusal.value.rank, refusal.value.index) == (rank, again)


@given(schedules(), st.data())
def test_a_swap_is_refused_or_leaves_a_schedule_that_holds(schedule, data):
    """Where a backward changes places with its forward, always refused."""
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    one, two = sorted(data.draw(st.tuples(*[st.integers(0, len(row) - 1)] * 2)))
    same = (row[one].stage, row[one].microbatch) == (row[two].stage, row[two].microbatch)
    row[one], row[two] = row[two], row[one]
    try:
        timeline = simulate(changed(schedule, rank, row), DOUBLE)
    except ScheduleError:
        return
    assert dependencies_hold(timeline, DOUBLE)
    assert not (same and row[two].kind == "forward" and row[one].kind in BACKWARDS)


def moved(schedule: Schedule, rank: int, action: Action, before: Action) -> Schedule:
    row = list(schedule.actions[rank])
    row.remove(action)
    row.insert(row.index(before), action)
    return changed(schedule, rank, row)


def forward(stage: int, microbatch: int, version: int = 0) -> Action:
    return Action("forward", stage, microbatch, version=version)


def backward(stage: int, microbatch: int, version: int = 0) -> Action:
    return Action("backward", stage, microbatch, version=version)


PLAIN = make("1f1b", 2, 2)
SPLIT = make("zero-bubble", 2, 2)
STASHED = make("pipedream", 2, 4)
SENT = Action("send", 0, 0, what="activation")
STEP = Action("step", microbatch=1, version=1)
REFUSED = {
    "a backward before its forward": (
        moved(PLAIN, 1, backward(1, 0), forward(1, 0)),
        "rank 1, action 1, backward of microbatch 0 at stage 1 (down): comes before the forward of microbatch 0",
    ),
    "a weight's backward before its input's": (
        moved(SPLIT, 0, Action("backward_weight", 0, 0), Action("backward_input", 0, 0)),
        "rank 0, action 5, backward weight of microbatch 0 at stage 0 (down): comes before the backward input",
    ),
    "a send before its forward": (
        moved(PLAIN, 0, SENT, forward(0, 0)),
        "rank 0, action 0, send of the activation of microbatch 0 at stage 0 (down): comes before the forward",
    ),
    "a forward before its receive": (
        moved(PLAIN, 1, forward(1, 0), Action("receive", 1, 0, what="activation")),
        "rank 1, action 0, forward of microbatch 0 at stage 1 (down): comes before the receive of the activation",
    ),
    "a version that does not exist yet": (
        changed(PLAIN, 0, [replace(a, version=1) if a == forward(0, 1) else a for a in PLAIN.actions[0]]),
        "forward of microbatch 1 at stage 0 (down): uses version 1 of the weights, but the newest is 0",
    ),
    "a backward with other weights": (
        changed(STASHED, 0, [replace(a, version=1) if a == backward(0, 1) else a for a in STASHED.actions[0]]),
        "backward of microbatch 1 at stage 0 (down): uses version 1 of the weights, but its forward used 0",
    ),
    "a gradient that is never reduced": (
        changed(PLAIN, 1, [a for a in PLAIN.actions[1] if a.kind not in ("reduce", "step")]),
        "rank 1, backward of microbatch 0 at stage 1 (down): its gradient is never reduced",
    ),
    "a reduce before a backward": (
        moved(PLAIN, 1, Action("reduce", microbatch=1), backward(1, 1)),
        "reduce after microbatch 1: comes before the backward of microbatch 1 at stage 1",
    ),
    "a reduce after too many backwards": (
        changed(PLAIN, 1, [replace(a, microbatch=0) if a.kind == "reduce" else a for a in PLAIN.actions[1]]),
        "reduce after microbatch 0: comes after the backward of microbatch 1 at stage 1",
    ),
    "a step before its reduce": (
        moved(PLAIN, 1, STEP, Action("reduce", microbatch=1)),
        "step after microbatch 1, which makes version 1: comes before the reduce",
    ),
    "a step that makes another version": (
        changed(PLAIN, 1, [replace(a, version=2) if a.kind == "step" else a for a in PLAIN.actions[1]]),
        "step after microbatch 1, which makes version 2: the newest version of the weights is 0",
    ),
    "a second step where all is synchronous": (
        replace(STASHED, is_versioned=False),
        "step after microbatch 1, which makes version 2: is a second update, in a schedule that does not say "
        "is_versioned=True",
    ),
    "no step": (
        changed(PLAIN, 1, list(PLAIN.actions[1][:-1])),
        "rank 1, step after microbatch 1, which makes version 1: is missing",
    ),
    "a missing action": (
        changed(PLAIN, 0, [a for a in PLAIN.actions[0] if a != SENT]),
        "rank 0, send of the activation of microbatch 0 at stage 0 (down): is missing",
    ),
    "an action of another rank": (
        changed(PLAIN, 0, [forward(1, 0), *PLAIN.actions[0]]),
        "rank 0, action 0, forward of microbatch 0 at stage 1 (down): does not belong here: this rank holds stage 0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_violates_a_dependency_is_refused_with_the_place(what):
    schedule, says = REFUSED[what]
    with pytest.raises(ScheduleError) as refusal:
        simulate(schedule, DOUBLE)
    assert str(refusal.value).startswith(f"{schedule.name}: rank ")
    assert says in str(refusal.value)


def test_a_deadlock_is_refused_with_the_places():
    """The first rank waits for a gradient before it sends what the second one begins with."""
    row = list(PLAIN.actions[1])
    both = [
        [row[row.index(Action("receive", 1, m, what="activation"))] for m in (1, 0)],
        *([forward(1, m), backward(1, m), Action("send", 1, m, what="gradient")] for m in (1, 0)),
    ]
    second = changed(PLAIN, 1, [*itertools.chain(*both), *row[-2:]])
    late = moved(second, 0, backward(0, 0), forward(0, 1))
    late = moved(late, 0, Action("receive", 0, 0, what="gradient"), backward(0, 0))
    with pytest.raises(ScheduleError) as refusal:
        simulate(late, DOUBLE)
    place = next(index for index, action in enumerate(late.actions[0]) if action == backward(0, 0))
    assert (refusal.value.rank, refusal.value.index, refusal.value.action) == (0, place, backward(0, 0))
    assert "a deadlock: rank 0 at action" in str(refusal.value)
    assert "for the send of the gradient of microbatch 0 at stage 1 (down); rank 1 at action 2" in str(refusal.value)
