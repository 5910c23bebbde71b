"""Every benchmark over everything that runs on a CPU gives right results, and a wrong one is found."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.bench.buffers import BufferKind
from echelon.bench.catalogue import BENCHMARKS, find
from echelon.bench.engine import figures, overlap_percent
from echelon.bench.operation import Case
from echelon.bench.options import Options
from tests.bench.world import failures_when_idle, printed

BARE = "tests.bench.arrays:bare"


def passes(ranks, size, name, transports, buffers):
    options = Options(name, 4, 96, 2, 1, validate=True, transports=transports, buffers=buffers)
    text, failed = ranks(size, printed, options.to_text())[0]
    assert not failed, text
    contenders = len(options.contenders(find(name)))
    figures = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert figures
    assert sum(line.count("Pass") for line in figures) == contenders * len(figures)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_transport_and_array(ranks, name):
    passes(ranks, 2, name, ("mpi", "gloo", "raw"), ("torch", "numpy", BARE))


@pytest.mark.parametrize("name", [name for name, benchmark in BENCHMARKS.items() if benchmark.objects])
def test_pickled_objects(ranks, name):
    passes(ranks, 2, name, ("raw",), ("pickle",))


@pytest.mark.parametrize("name", [name for name, benchmark in BENCHMARKS.items() if benchmark.is_collective])
def test_three_ranks(ranks, name):
    passes(ranks, 3, name, ("mpi", "raw"), ("torch",))


@pytest.mark.parametrize("name", ["multi_lat", "mbw_mr"])
def test_two_pairs(ranks, name):
    passes(ranks, 4, name, ("mpi", "raw"), ("torch", "pickle"))


def test_an_operation_that_does_nothing_is_found(ranks):
    """In every benchmark that moves anything, so that no check passes by itself."""
    names = [name for name, benchmark in BENCHMARKS.items() if benchmark.sized]
    for failures in ranks(2, failures_when_idle, names):
        assert {name for name, text in failures.items() if not text} == set()
        assert failures["gather"].startswith("gather of 64 bytes over mpi: rank 0 got 0 for ")
        assert failures["bcast"].startswith("bcast of 64 bytes over mpi: rank 1 got 0 for ")


def case(size: int, ranks: int) -> Case:
    return Case(size, np.dtype(np.uint8), 0, ranks, None, BufferKind("torch"), "cpu")


def test_latency_is_half_the_round_trip_of_the_first_half():
    assert figures(find("latency"), case(8, 2), np.array([10e-6, 99]))["latency_us"] == pytest.approx(5)
    two_pairs = figures(find("multi_lat"), case(8, 4), np.array([10e-6, 30e-6, 99, 99]))
    assert two_pairs == pytest.approx({"latency_us": 10, "min_us": 5, "max_us": 15})


def test_a_collective_is_averaged_over_all_ranks():
    three = figures(find("bcast"), case(8, 3), np.array([1e-6, 2e-6, 6e-6]))
    assert three == pytest.approx({"latency_us": 3, "min_us": 1, "max_us": 6})


@pytest.mark.parametrize(("name", "ranks", "megabytes"), [("bw", 2, 64), ("bibw", 2, 128), ("mbw_mr", 4, 128)])
def test_bandwidth_counts_a_window_of_messages_in_millions_of_bytes(name, ranks, megabytes):
    found = figures(find(name), case(10**6, ranks), np.array([1.0, 1.0, 99, 99])[: ranks // 2 + 1])
    assert found == pytest.approx({"mb_per_s": megabytes, "messages_per_s": megabytes})


@pytest.mark.parametrize(("overall", "percent"), [(10, 100), (9, 100), (15, 50), (20, 0), (30, 0)])
def test_overlap(overall, percent):
    assert overlap_percent(overall, compute=10, pure=10) == percent
