"""Every rank gets the pieces of all ranks. The size is that of a piece."""

from __future__ import annotations

from echelon.bench.operation import Benchmark, Case, Exchange


def prepare(case: Case, vector: bool = False) -> Exchange:
    piece, whole = case.buffer(case.count), case.buffer(case.count * case.ranks)
    call = (case.carrier.all_gather_v if vector else case.carrier.all_gather)(piece, whole)
    return Exchange(
        call,
        piece,
        lambda round_: case.values(case.rank, round_),
        whole,
        lambda round_: case.joined(case.everyone(), round_),
    )


def prepare_v(case: Case) -> Exchange:
    return prepare(case, vector=True)


BENCHMARKS = (
    Benchmark("allgather", "Allgather Latency Test", "every rank gets the pieces of all", prepare),
    Benchmark("allgatherv", "Allgatherv Latency Test", "allgather with a count for each rank", prepare_v),
)
