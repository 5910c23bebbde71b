"""What was asked for, checked as far as it can be before any rank starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from echelon.bench.buffers import BufferKind
from echelon.bench.catalogue import ALL, find
from echelon.bench.operation import Benchmark

TRANSPORTS = {"mpi": "MPI", "gloo": "Gloo", "raw": "raw MPI"}
LARGE_MESSAGE = 8192  # bytes; above it, fewer iterations
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_RANKS = {"two": "exactly two ranks", "even": "an even number of ranks", "any": "at least two ranks"}


class BadRequest(ValueError):
    """Something asked for that cannot be had; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Contender:
    """What is measured side by side with others: a transport and a kind of buffer."""

    transport: str
    buffer: str


@dataclass(frozen=True, slots=True)
class Options:
    """One request. `None` stands for the benchmark's own default, which is OMB's."""

    name: str
    smallest: int | None = None
    largest: int | None = None
    iterations: int | None = None
    warmup: int | None = None
    full: bool = False
    validate: bool = False
    transports: tuple[str, ...] = ("mpi",)
    buffers: tuple[str, ...] = ("torch",)
    device: str = "cpu"
    json: str = ""
    plot: str = ""
    output: str = ""
    terminal: int = 0  # columns of the terminal that the launcher writes to; 0 if it is none

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Options:
        fields = json.loads(text)
        return Options(**fields | {name: tuple(fields[name]) for name in ("transports", "buffers")})

    def check(self, ranks: int) -> None:
        """Raise a `ValueError` that tells the user what is wrong, if anything is."""
        if not self.transports or not self.buffers:
            raise BadRequest("--transport and --buffer must name at least one each")
        for transport in self.transports:
            if transport not in TRANSPORTS:
                raise BadRequest(f"there is no transport {transport!r}: take of {', '.join(TRANSPORTS)}")
        for buffer in self.buffers:
            BufferKind(buffer).check(self.device)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BadRequest("--device cuda needs a GPU that PyTorch sees, and there is none here")
        if self.device not in ("cpu", "cuda"):
            raise BadRequest(f"there is no device {self.device!r}: take cpu or cuda")
        if self.iterations is not None and self.iterations < 1:
            raise BadRequest(f"-i {self.iterations}: at least one iteration must be timed")
        if self.warmup is not None and self.warmup < 0:
            raise BadRequest(f"-x {self.warmup}: there can be no fewer than 0 warm-up iterations")
        if ranks < 2:
            raise BadRequest(f"-n {ranks}: there is nothing to send to; a benchmark needs at least two ranks")
        if self.name != ALL:
            self.check_benchmark(find(self.name), ranks)

    def check_benchmark(self, benchmark: Benchmark, ranks: int) -> None:
        if (benchmark.ranks == "two" and ranks != 2) or (benchmark.ranks == "even" and ranks % 2):
            raise BadRequest(f"{benchmark.name} needs {_RANKS[benchmark.ranks]}, not {ranks}")
        if benchmark.sized and not list(self.sizes(benchmark, ranks)):
            least = benchmark.smallest(ranks) * benchmark.dtype.itemsize
            raise BadRequest(f"-m leaves no size: {benchmark.name} needs {least} bytes or more on {ranks} ranks")
        self.contenders(benchmark)

    def contenders(self, benchmark: Benchmark) -> list[Contender]:
        """Every kind of buffer over every transport that carries it."""
        found = []
        for buffer in self.buffers:
            transports = _for_objects(benchmark, self.transports) if BufferKind(buffer).pickles else self.transports
            found += [Contender(transport, buffer) for transport in transports]
        return found

    def sizes(self, benchmark: Benchmark, ranks: int) -> Iterator[int]:
        """The sizes of messages in bytes: doubling, without those that hold no whole element."""
        if not benchmark.sized:
            yield 0
            return
        least = benchmark.smallest(ranks) * benchmark.dtype.itemsize
        size = self.smallest or 1
        largest = self.largest or (2**20 if benchmark.is_collective else 2**22)
        while size <= largest:
            if size >= least:
                yield size
            size *= 2

    def repetitions(self, benchmark: Benchmark, size: int) -> tuple[int, int]:
        """How many calls are timed, and how many before them are not: OMB's figures, unless given."""
        small = size <= LARGE_MESSAGE
        if benchmark.moved is not None:
            iterations, warmup = (100, 10) if small else (20, 2)
        elif benchmark.is_collective:
            iterations, warmup = (1000, 100) if small else (100, 10)
        else:
            iterations, warmup = (10000, 100) if small else (1000, 10)
        return (
            iterations if self.iterations is None else self.iterations,
            warmup if self.warmup is None else self.warmup,
        )


def parse_sizes(text: str) -> tuple[int | None, int | None]:
    """`4:16M` is smallest and largest; `1M`, as in OMB, is the largest alone, `4:` the smallest."""
    smallest, colon, largest = text.partition(":")
    if not colon:
        smallest, largest = "", text
    low, high = (_parse_size(part, text) if part else None for part in (smallest, largest))
    if (low is None and high is None) or (low is not None and high is not None and low > high):
        raise BadRequest(f"-m {text}: give sizes in bytes as MIN:MAX, MAX or MIN:, for example 4:16M")
    return low, high


def _parse_size(part: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", part.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise BadRequest(f"-m {text}: {part!r} is no size; a size is a number of bytes, with K, M or G if you like")
    return int(match[1]) * _UNITS[match[2].upper()]


def _for_objects(benchmark: Benchmark, transports: tuple[str, ...]) -> tuple[str, ...]:
    """Objects go through mpi4py's own methods, so `mpi` and `raw` are one for them, and Gloo has none."""
    if not benchmark.objects:
        raise BadRequest(f"{benchmark.name} has no pickled form: mpi4py has no such operation for objects")
    over = tuple(transport for transport in transports if transport != "gloo")[:1]
    if not over:
        raise BadRequest("pickled objects go over MPI, through mpi4py's own methods: add mpi to --transport")
    return over
