"""The runtime with what any chain may send: tuples, several dtypes, shapes of each microbatch's own, skips, ties."""

from __future__ import annotations

import itertools

import pytest

from tests.parallel.pipeline.chains import outputs, runs_out, train
from tests.parallel.pipeline.test_run import SYNCHRONOUS

ONE_RANK = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 1)]


@pytest.mark.parametrize(("schedule", "stages"), [*ONE_RANK, *itertools.product(SYNCHRONOUS, [2, 4])])
def test_chains_with_skips_and_shapes_that_vary(ranks, schedule, stages):
    for told in ranks(max(stages, 2), train, schedule, stages, 4, [], True):
        assert max(told.values()) <= 1e-12, told


def test_layer_parallelism_is_one_microbatch(ranks):
    for told in ranks(4, train, "1f1b", 4, 1, [], False):
        assert max(told.values()) <= 1e-12, told


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "chimera"])
def test_stages_that_compute_again(ranks, schedule):
    for told in ranks(4, train, schedule, 4, 4, [0, 2, 3], False):
        assert max(told.values()) <= 1e-12, told


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "chimera"])
def test_forward_alone(ranks, schedule):
    assert max(ranks(2, outputs, schedule, 2, 4)) <= 1e-12


def test_a_stage_that_does_not_fit_says_what_would(ranks):
    said, _ = ranks(2, runs_out)
    assert "stage 0 of 1 (links 0 to 1, on rank 0 of the pipeline) ran out of memory in forward" in said
    assert "Use smaller microbatches, recomputation, more stages" in said
