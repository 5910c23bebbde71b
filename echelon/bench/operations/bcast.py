"""Every rank gets what the root has."""

from __future__ import annotations

import numpy as np

from echelon.bench.operation import ROOT, Benchmark, Case, Exchange


def prepare(case: Case) -> Exchange:
    data = case.buffer(case.count)
    return Exchange(
        case.carrier.broadcast(data),
        data,
        lambda round_: case.values(ROOT, round_) if case.is_root else np.zeros(case.count, case.dtype),
        data,
        lambda round_: case.values(ROOT, round_),
    )


BENCHMARKS = (Benchmark("bcast", "Broadcast Latency Test", "every rank gets what the root has", prepare),)
