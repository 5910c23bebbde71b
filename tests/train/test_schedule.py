"""The learning rate at the corners of each schedule, and how it goes between them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.train.config import Schedule
from echelon.train.schedule import learning_rate


def rates(kind: str, steps: int, warmup: int, peak: float = 2.0, **more: float) -> list[float]:
    schedule = Schedule(kind=kind, warmup=warmup, **more)  # type: ignore[arg-type]
    return [learning_rate(step, steps, peak, schedule) for step in range(steps)]


def test_cosine():
    found = rates("cosine", 30, 10, floor=0.1)
    assert found[0] == pytest.approx(0.2)
    assert found[4] == pytest.approx(1.0)
    assert found[9] == 2.0
    assert found[19] == pytest.approx((2.0 + 0.2) / 2)  # half way
    assert found[29] == pytest.approx(0.2)


def test_warmup_stable_decay():
    found = rates("wsd", 100, 10, decay=0.2, floor=0.0)
    assert found[0] == pytest.approx(0.2)
    assert found[9:80] == [2.0] * 71
    assert found[89] == pytest.approx(1.0)
    assert found[99] == 0.0


def test_constant():
    assert rates("constant", 20, 4) == [0.5, 1.0, 1.5, *[2.0] * 17]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_without_warmup(kind):
    assert rates(kind, 1000, 0)[0] == pytest.approx(2.0, rel=1e-5)


def test_decay_never_begins_before_the_warmup_ends():
    found = rates("wsd", 10, 8, decay=0.9, floor=0.5)
    assert found[7:] == [2.0, 1.5, 1.0]


def test_a_run_shorter_than_its_warmup():
    assert rates("cosine", 3, 4) == [0.5, 1.0, 1.5]


def test_after_the_last_step_it_stays():
    assert learning_rate(500, 30, 2.0, Schedule(kind="cosine", warmup=10, floor=0.25)) == pytest.approx(0.5)


@given(
    kind=st.sampled_from(["cosine", "wsd", "constant"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    decay=st.floats(0, 1),
    floor=st.floats(0, 1),
)
def test_rises_to_the_peak_and_never_again(kind, steps, warmup, decay, floor):
    found = rates(kind, steps, warmup, 1.0, decay=decay, floor=floor)
    turn = min(max(warmup - 1, 0), steps - 1)
    assert all(one < other for one, other in itertools.pairwise(found[: turn + 1]))
    assert all(one >= other for one, other in itertools.pairwise(found[turn:]))
    assert all(0 <= rate <= 1 for rate in found)
    if steps > warmup:
        assert found[-1] >= floor - 1e-12
    if steps > max(warmup, 1) and kind == "cosine":
        assert found[-1] == pytest.approx(floor, abs=1e-12)
