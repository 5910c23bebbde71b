"""The root gets the sum over all ranks, in place."""

from __future__ import annotations

import numpy as np

from echelon.bench.operation import Benchmark, Case, Exchange


def prepare(case: Case) -> Exchange:
    data = case.buffer(case.count)
    return Exchange(
        case.carrier.reduce(data),
        data,
        lambda round_: case.values(case.rank, round_),
        data if case.is_root else None,
        lambda round_: np.sum([case.values(rank, round_) for rank in case.everyone()], axis=0),
    )


BENCHMARKS = (Benchmark("reduce", "Reduce Latency Test", "the root gets the sum", prepare, reduces=True),)
