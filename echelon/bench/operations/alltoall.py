"""Every rank sends a piece of its own to each rank. The size is that of a piece."""

from __future__ import annotations

from echelon.bench.operation import Benchmark, Case, Exchange


def prepare(case: Case, vector: bool = False) -> Exchange:
    source, result = (case.buffer(case.count * case.ranks) for _ in range(2))
    call = (case.carrier.all_to_all_v if vector else case.carrier.all_to_all)(source, result)
    first, all_pieces = case.rank * case.ranks, case.ranks * case.ranks  # piece from a to b has the seed a * ranks + b
    return Exchange(
        call,
        source,
        lambda round_: case.joined(range(first, first + case.ranks), round_),
        result,
        lambda round_: case.joined(range(case.rank, all_pieces, case.ranks), round_),
    )


def prepare_v(case: Case) -> Exchange:
    return prepare(case, vector=True)


BENCHMARKS = (
    Benchmark(
        "alltoall", "All-to-All Personalized Exchange Latency Test", "every rank sends a piece to each rank", prepare
    ),
    Benchmark(
        "alltoallv",
        "All-to-Allv Personalized Exchange Latency Test",
        "alltoall with a count for each rank",
        prepare_v,
    ),
)
