"""What passes over Gloo passes over Echelon: each such test of PyTorch's own suite, on ranks that live on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.harness import Harness
from tests.conformance.reference import recorded
from tests.conformance.suite import PASSED

pytest.importorskip("expecttest", reason="PyTorch's suite for backends needs the package expecttest")

_ALWAYS = 2  # the ranks with which every run of the tests checks; other numbers of ranks are for the slow runs
_CASES = [
    pytest.param(ranks, name, id=f"{name}-{ranks}", marks=() if ranks == _ALWAYS else pytest.mark.slow)
    for ranks, outcomes in recorded().items()
    for name, outcome in outcomes.items()
    if outcome == PASSED
]


@pytest.fixture(scope="module")
def harnesses() -> Iterator[dict[int, Harness]]:
    made = {ranks: Harness(ranks) for ranks in recorded()}
    yield made
    for harness in made.values():
        harness.close()


@pytest.mark.parametrize(("ranks", "name"), _CASES)
def test_what_gloo_passes(harnesses: dict[int, Harness], ranks: int, name: str) -> None:
    outcome = harnesses[ranks].run(name, "echelon")
    assert outcome.summary == PASSED, outcome.details


def test_a_hang_costs_only_its_ranks(harnesses: dict[int, Harness]) -> None:
    harness = harnesses[_ALWAYS]
    slow = harness.run("test_monitored_barrier_gloo", "echelon", seconds=0.5)
    assert slow.summary == "hung"
    assert "monitored_barrier" in slow.details, "the stacks of the ranks say where"
    assert harness.run("test_get_rank", "echelon").summary == PASSED
