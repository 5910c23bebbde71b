"""Half the time of a message there and back: between two ranks, or in every pair at once."""

from __future__ import annotations

from echelon.bench.operation import Benchmark, Case, Exchange


def prepare(case: Case) -> Exchange:
    out, into = case.buffer(case.count), case.buffer(case.count)
    send, receive = case.carrier.send(out, case.partner), case.carrier.receive(into, case.partner)
    first, second = (send, receive) if case.leads else (receive, send)

    def there_and_back() -> None:
        first()
        second()

    return Exchange(
        there_and_back,
        out,
        lambda round_: case.values(case.rank, round_),
        into,
        lambda round_: case.values(case.partner, round_),
    )


BENCHMARKS = (
    Benchmark(
        "latency",
        "Latency Test",
        "one-way time of a message between two ranks",
        prepare,
        ranks="two",
        separate=False,
        round_trip=True,
    ),
    Benchmark(
        "multi_lat",
        "Multi Latency Test",
        "the same in several pairs at once, first half of the ranks with second",
        prepare,
        ranks="even",
        round_trip=True,
    ),
)
