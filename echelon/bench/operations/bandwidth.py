"""Bytes a second one way: a window of messages under way at once, then a short answer; in one pair or in all."""

from __future__ import annotations

from echelon.bench.operation import WINDOW, Benchmark, Case, Exchange


def prepare(case: Case) -> Exchange:
    data, answer = case.buffer(case.count), case.buffer(1)
    if case.leads:
        start, finish = case.carrier.start_send(data, case.partner), case.carrier.receive(answer, case.partner)
    else:
        start, finish = case.carrier.start_receive(data, case.partner), case.carrier.send(answer, case.partner)

    def window() -> None:
        for work in [start() for _ in range(WINDOW)]:
            work.wait()
        finish()

    if case.leads:
        return Exchange(window, data, lambda round_: case.values(case.rank, round_))
    return Exchange(window, result=data, wanted=lambda round_: case.values(case.partner, round_))


def moved(case: Case) -> int:
    return case.size * WINDOW * case.pairs


BENCHMARKS = (
    Benchmark(
        "bw",
        "Bandwidth Test",
        "one-way bandwidth between two ranks",
        prepare,
        columns="bandwidth",
        ranks="two",
        separate=False,
        moved=moved,
    ),
    Benchmark(
        "mbw_mr",
        "Multiple Bandwidth / Message Rate Test",
        "bandwidth and messages a second of several pairs together",
        prepare,
        columns="rate",
        ranks="even",
        moved=moved,
    ),
)
