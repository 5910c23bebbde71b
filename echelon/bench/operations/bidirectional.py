"""Bytes a second both ways at once: each of two ranks has a window of messages going out and one coming in."""

from __future__ import annotations

from echelon.bench.operation import WINDOW, Benchmark, Case, Exchange


def prepare(case: Case) -> Exchange:
    out, into = case.buffer(case.count), case.buffer(case.count)
    send, receive = case.carrier.start_send(out, case.partner), case.carrier.start_receive(into, case.partner)

    def windows() -> None:
        coming = [receive() for _ in range(WINDOW)]
        going = [send() for _ in range(WINDOW)]
        for work in (*going, *coming):
            work.wait()

    return Exchange(
        windows,
        out,
        lambda round_: case.values(case.rank, round_),
        into,
        lambda round_: case.values(case.partner, round_),
    )


def moved(case: Case) -> int:
    return 2 * case.size * WINDOW


BENCHMARKS = (
    Benchmark(
        "bibw",
        "Bi-Directional Bandwidth Test",
        "bandwidth between two ranks, both ways at once",
        prepare,
        columns="bandwidth",
        ranks="two",
        separate=False,
        moved=moved,
    ),
)
