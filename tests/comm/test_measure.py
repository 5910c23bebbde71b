"""The timing engine, with a clock that the test turns: what is called how often, and which moments are subtracted."""

from __future__ import annotations

import pytest

from echelon.comm import measure


class Clock:
    """Every call of `passes(seconds)` moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def passes(self, name: str, seconds: float):
        def call():
            self.now += seconds
            self.log.append(name)
            return self

        return call

    def wait(self) -> None:
        self.passes("wait", 8)()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measure, "perf_counter", lambda: made.now)
    return made


def test_separate_calls_have_a_barrier_after_each_that_is_not_timed(clock):
    seconds = measure.call_times(clock.passes("call", 2), 3, 1, clock.passes("barrier", 100), separate=True)
    assert seconds.tolist() == [2, 2, 2]
    assert clock.log == ["barrier", *["call", "barrier"] * 4]


def test_running_calls_follow_each_other(clock):
    seconds = measure.call_times(clock.passes("call", 2), 3, 2, clock.passes("barrier", 100), separate=False)
    assert seconds.tolist() == [2, 2, 2]
    assert clock.log == ["barrier", *["call"] * 5]


def test_overlapped_times_are_of_start_computing_and_wait(clock):
    times = measure.overlapped_times(
        clock.passes("start", 1), clock.passes("compute", 4), 2, 1, clock.passes("barrier", 100)
    )
    assert times.overall.tolist() == [13, 13]
    assert times.start.tolist() == [1, 1]
    assert times.wait.tolist() == [8, 8]
    assert clock.log == ["barrier", *["start", "compute", "wait", "barrier"] * 3]


@pytest.mark.parametrize(("seconds", "products", "rows"), [(1.0, 1, 1024), (3.5, 1, 3584), (32.0, 2, 16384)])
def test_a_computation_is_as_much_as_the_time_allows(clock, monkeypatch, seconds, products, rows):
    """With a clock by which a product of 1024 rows takes a second."""
    done = []

    def mm(matrix, _square, out):
        done.append(matrix.shape[0])
        clock.now += matrix.shape[0] / 1024

    monkeypatch.setattr(measure.torch, "mm", mm)
    computation = measure.Computation(seconds)
    done.clear()
    computation()
    assert done == [rows] * products


def test_the_garbage_collector_rests_and_comes_back():
    import gc

    seen = []
    measure.call_times(lambda: seen.append(gc.isenabled()), 1, 0, lambda: None, separate=True)
    assert seen == [False]
    assert gc.isenabled()
