"""What an operation's file says of it, and what it is given to say it with.

`prepare` gets a `Case` (a size, a carrier, this rank's place), makes its buffers and returns an `Exchange`: the call to
time, what goes in and what must come out. The values in the buffers follow from a seed and the round, so every rank
can compute what any other has sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echelon.bench.buffers import Buffer, BufferKind
from echelon.bench.carriers import Carrier

ROOT = 0
WINDOW = 64  # messages under way at once in the tests of bandwidth


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark at one size over one carrier, as one rank sees it."""

    size: int
    dtype: np.dtype[Any]
    rank: int
    ranks: int
    carrier: Carrier
    kind: BufferKind
    device: str

    @property
    def count(self) -> int:
        return self.size // self.dtype.itemsize

    @property
    def is_root(self) -> bool:
        return self.rank == ROOT

    @property
    def pairs(self) -> int:
        return self.ranks // 2

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its pair: it sends first, and its clock counts."""
        return self.rank < self.pairs

    @property
    def partner(self) -> int:
        return self.rank + self.pairs if self.leads else self.rank - self.pairs

    def buffer(self, count: int) -> Buffer:
        return self.kind.make(count, self.dtype, self.device)

    def values(self, seed: int, round_: int, count: int | None = None) -> np.ndarray:
        """Small whole numbers, never 0, so that sums are exact and nothing passes that was not written."""
        index = np.arange(self.count if count is None else count)
        return ((index * 7 + seed * 13 + round_ * 29) % 97 + 1).astype(self.dtype)

    def joined(self, seeds: range, round_: int) -> np.ndarray:
        """The values of several seeds, one after another."""
        return np.concatenate([self.values(seed, round_) for seed in seeds])

    def everyone(self) -> range:
        return range(self.ranks)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call that is ready to be made, and what it does to this rank's buffers."""

    call: Callable[[], Any]
    source: Buffer | None = None
    given: Callable[[int], np.ndarray] | None = None  # what `source` holds before the call, by round
    result: Buffer | None = None
    wanted: Callable[[int], np.ndarray] | None = None  # what `result` must hold after it; None: nothing comes here


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An operation as `echelon bench` knows it.

    `ranks` is `two`, `even` or `any`. `moved`, for a bandwidth, is how many bytes one call moves. Calls that are not
    `separate` follow each other without a barrier between.
    """

    name: str
    title: str
    what: str
    prepare: Callable[[Case], Exchange]
    columns: str = "latency"
    ranks: str = "any"
    reduces: bool = False
    sized: bool = True
    separate: bool = True
    round_trip: bool = False
    nonblocking: bool = False
    objects: bool = True
    moved: Callable[[Case], int] | None = None
    smallest: Callable[[int], int] = lambda ranks: 1  # elements, by the number of ranks

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self.reduces else np.uint8)

    @property
    def is_collective(self) -> bool:
        return self.ranks == "any"


def nonblocking(benchmark: Benchmark) -> Benchmark:
    """The same operation, started, computed beside, and waited for."""
    spoken = benchmark.title.removesuffix(" Latency Test").removesuffix(" Personalized Exchange")
    return replace(
        benchmark,
        name=f"i{benchmark.name}",
        title=f"Non-blocking {spoken} Latency Test",
        what=f"{benchmark.what}, while the rank computes",
        columns="overlap",
        nonblocking=True,
        objects=False,
    )
