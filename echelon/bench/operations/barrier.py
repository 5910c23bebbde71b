"""Nobody goes on before all have come. There is no size, and nothing to check but that all get through."""

from __future__ import annotations

from echelon.bench.operation import Benchmark, Case, Exchange


def prepare(case: Case) -> Exchange:
    return Exchange(case.carrier.barrier())


BENCHMARKS = (Benchmark("barrier", "Barrier Latency Test", "all ranks wait for each other", prepare, sized=False),)
