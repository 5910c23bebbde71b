"""The closed forms equal the simulator where what they assume holds."""

from __future__ import annotations

import pytest

from echelon.parallel.pipeline.schedule import SCHEDULES, make
from echelon.parallel.pipeline.simulate import Costs, simulate
from echelon.plan.schedule_forms import closed_forms

EQUAL, DOUBLE = Costs(2, 1, 1), Costs(1, 1, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_forms_equal_the_simulator(name):
    for ranks, batches in ((2, 2), (4, 2), (4, 3), (8, 2)):
        schedule = make(name, ranks, ranks * batches, chunks=3 if name == "interleaved" else 1)
        timeline = simulate(schedule, EQUAL if name == "chimera" else DOUBLE)
        forms = closed_forms(schedule)
        for counts, form in ((timeline.activations, forms.activations), (timeline.weights, forms.weights)):
            held = [count / schedule.chunks for count in counts]
            assert (min(held), max(held)) == pytest.approx((form.least, form.most)), (ranks, batches)
        if "N → ∞" not in forms.bubble.assumes:
            assert timeline.bubble == pytest.approx(forms.bubble.least), (ranks, batches)


@pytest.mark.parametrize("name", ["gems", "pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("backward", [1, 2])
def test_limits_are_reached_by_many_microbatches(name, backward):
    schedule = make(name, 4, 400)
    timeline = simulate(schedule, EQUAL if backward == 1 else DOUBLE)
    form = closed_forms(schedule, backward=backward).bubble
    assert "N → ∞" in form.assumes
    assert timeline.bubble == pytest.approx(form.least, abs=1e-2)
