"""Every rank gets its piece of what the root has. The size is that of a piece."""

from __future__ import annotations

from echelon.bench.operation import Benchmark, Case, Exchange


def prepare(case: Case, vector: bool = False) -> Exchange:
    whole = case.buffer(case.count * case.ranks) if case.is_root else None
    piece = case.buffer(case.count)
    return Exchange(
        (case.carrier.scatter_v if vector else case.carrier.scatter)(whole, piece),
        whole,
        lambda round_: case.joined(case.everyone(), round_),
        piece,
        lambda round_: case.values(case.rank, round_),
    )


def prepare_v(case: Case) -> Exchange:
    return prepare(case, vector=True)


BENCHMARKS = (
    Benchmark("scatter", "Scatter Latency Test", "every rank gets its piece of the root's", prepare),
    Benchmark("scatterv", "Scatterv Latency Test", "scatter with a count for each rank", prepare_v),
)
