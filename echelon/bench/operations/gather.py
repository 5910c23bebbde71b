"""The root gets the pieces of all ranks. The size is that of a piece."""

from __future__ import annotations

from echelon.bench.operation import Benchmark, Case, Exchange


def prepare(case: Case, vector: bool = False) -> Exchange:
    piece = case.buffer(case.count)
    whole = case.buffer(case.count * case.ranks) if case.is_root else None
    return Exchange(
        (case.carrier.gather_v if vector else case.carrier.gather)(piece, whole),
        piece,
        lambda round_: case.values(case.rank, round_),
        whole,
        lambda round_: case.joined(case.everyone(), round_),
    )


def prepare_v(case: Case) -> Exchange:
    return prepare(case, vector=True)


BENCHMARKS = (
    Benchmark("gather", "Gather Latency Test", "the root gets the pieces of all", prepare),
    Benchmark("gatherv", "Gatherv Latency Test", "gather with a count for each rank", prepare_v),
)
