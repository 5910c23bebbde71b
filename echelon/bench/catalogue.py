"""All benchmarks by name, in the order in which they are listed and run."""

from __future__ import annotations

from difflib import get_close_matches

from echelon.bench.operation import Benchmark, nonblocking
from echelon.bench.operations import (
    allgather,
    allreduce,
    alltoall,
    bandwidth,
    barrier,
    bcast,
    bidirectional,
    gather,
    latency,
    reduce,
    reduce_scatter,
    scatter,
)

ALL = "all"
_MESSAGES = (
    latency.BENCHMARKS[0],
    bandwidth.BENCHMARKS[0],
    bidirectional.BENCHMARKS[0],
    latency.BENCHMARKS[1],
    bandwidth.BENCHMARKS[1],
)
_COLLECTIVES: tuple[Benchmark, ...] = tuple(
    benchmark
    for module in (allgather, allreduce, alltoall, barrier, bcast, gather, reduce, reduce_scatter, scatter)
    for benchmark in module.BENCHMARKS
)
_NONBLOCKING = tuple(map(nonblocking, _COLLECTIVES))
BENCHMARKS = {one.name: one for one in (*_MESSAGES, *_COLLECTIVES, *_NONBLOCKING)}


class UnknownBenchmark(ValueError):
    """There is none of this name; the message has the nearest."""


def find(name: str) -> Benchmark:
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    near = get_close_matches(name.lower().removeprefix("osu_"), [*BENCHMARKS, ALL], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UnknownBenchmark(f"there is no benchmark {name!r}: {hint}`echelon bench` lists them all")
