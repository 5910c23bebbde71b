"""Every rank gets its part of the sum over all ranks. The size is that of the whole, cut down to equal parts."""

from __future__ import annotations

import numpy as np

from echelon.bench.operation import Benchmark, Case, Exchange


def prepare(case: Case) -> Exchange:
    part = case.count // case.ranks
    whole, piece = case.buffer(part * case.ranks), case.buffer(part)
    mine = slice(case.rank * part, (case.rank + 1) * part)

    def values(rank: int, round_: int) -> np.ndarray:
        return case.values(rank, round_, part * case.ranks)

    return Exchange(
        case.carrier.reduce_scatter(whole, piece),
        whole,
        lambda round_: values(case.rank, round_),
        piece,
        lambda round_: np.sum([values(rank, round_)[mine] for rank in case.everyone()], axis=0),
    )


BENCHMARKS = (
    Benchmark(
        "reduce_scatter",
        "Reduce_scatter Latency Test",
        "every rank gets its part of the sum",
        prepare,
        reduces=True,
        objects=False,
        smallest=lambda ranks: ranks,
    ),
)
