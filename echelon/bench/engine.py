"""The engine: times every benchmark at every size over every contender, checks, and reduces the times over the ranks.

For each size the contenders take turns, so that whatever else the machine does hits all of them. A rank's figure is its
mean over the iterations, as in OMB; what is printed is the average over the ranks whose clocks count.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from echelon.bench.buffers import BufferKind
from echelon.bench.carriers import BufferCarrier, Carrier, ObjectCarrier, TorchCarrier
from echelon.bench.operation import Benchmark, Case, Exchange
from echelon.bench.options import Contender, Options
from echelon.bench.result import Result, Row
from echelon.comm.measure import Computation, call_times, overlapped_times
from echelon.comm.world import library_name, mpi_world

_ROUNDS = (1, 2)  # of validation, each with other values


@dataclass(frozen=True, slots=True)
class World:
    """This rank's communicators: one group a transport, and one of our own for barriers and figures."""

    rank: int
    ranks: int
    control: Any
    raw: Any
    groups: dict[str, dist.ProcessGroup]

    def carrier(self, contender: Contender, nonblocking: bool) -> Carrier:
        if BufferKind(contender.buffer).pickles:
            return ObjectCarrier(self.raw)
        if contender.transport == "raw":
            return BufferCarrier(self.raw, nonblocking)
        return TorchCarrier(self.groups[contender.transport], nonblocking)

    def gather(self, figures: list[float]) -> np.ndarray:
        """Every rank's figures, a row each, for all to see."""
        rows = np.empty((self.ranks, len(figures)))
        self.control.Allgather(np.array(figures, dtype=np.float64), rows)
        return rows


def join(transports: tuple[str, ...]) -> World:
    """Become a rank: of the group over MPI and, if it is asked for, of one over Gloo."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    if not dist.is_initialized():
        dist.init_process_group("echelon")
    assert dist.group.WORLD is not None
    groups = {"mpi": dist.group.WORLD}
    if "gloo" in transports:
        groups["gloo"] = dist.new_group(backend="gloo")
    comm = mpi_world()
    return World(comm.Get_rank(), comm.Get_size(), comm.Dup(), comm.Dup(), groups)


def begin(benchmark: Benchmark, options: Options, world: World) -> Result:
    """The result, before there are rows in it."""
    contenders = options.contenders(benchmark)
    return Result(
        benchmark.name,
        benchmark.title,
        benchmark.columns,
        "MPI_FLOAT" if benchmark.reduces else "MPI_CHAR",
        {label: _words(contender, options.device) for label, contender in _labelled(contenders).items()},
        machine(world),
    )


def rows(benchmark: Benchmark, options: Options, world: World) -> Iterator[Row | str]:
    """The rows, as they are measured; after the first that fails validation, what was wrong."""
    contenders = _labelled(options.contenders(benchmark))
    for size in options.sizes(benchmark, world.ranks):
        iterations, warmup = options.repetitions(benchmark, size)
        row, failure = Row(size, iterations), ""
        for label, contender in contenders.items():
            case = _case(benchmark, contender, size, options.device, world)
            exchange = _synchronized(benchmark.prepare(case), benchmark.nonblocking)
            if options.validate:
                wrong = _validate(exchange, benchmark.nonblocking, world)
                row.valid[label] = not wrong
                failure = failure or (wrong and f"{benchmark.name} of {size} bytes over {label}: {wrong}")
            _clear(exchange)
            row.figures[label] = _figures(benchmark, case, exchange, iterations, warmup, world)
        yield row
        if failure:
            yield failure
            return


def machine(world: World) -> dict[str, Any]:
    from mpi4py import MPI

    return {
        "ranks": world.ranks,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "mpi": library_name(MPI),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }


def _case(benchmark: Benchmark, contender: Contender, size: int, device: str, world: World) -> Case:
    kind = BufferKind(contender.buffer)
    carrier = world.carrier(contender, benchmark.nonblocking)
    return Case(size, benchmark.dtype, world.rank, world.ranks, carrier, kind, device)


def _figures(
    benchmark: Benchmark, case: Case, exchange: Exchange, iterations: int, warmup: int, world: World
) -> dict[str, float]:
    if benchmark.nonblocking:
        return _overlap(exchange.call, iterations, warmup, world)
    times = call_times(exchange.call, iterations, warmup, world.control.Barrier, separate=benchmark.separate)
    return figures(benchmark, case, world.gather([float(times.mean())])[:, 0])


def figures(benchmark: Benchmark, case: Case, seconds: np.ndarray) -> dict[str, float]:
    """What is reported of the seconds that a call took on each rank. In pairs, the clocks of the first half count."""
    if not benchmark.is_collective:
        seconds = seconds[: case.pairs]
    if benchmark.moved is not None:
        rate = benchmark.moved(case) / float(seconds.mean())
        return {"mb_per_s": rate / 1e6, "messages_per_s": rate / case.size}
    microseconds = seconds * (1e6 / (2 if benchmark.round_trip else 1))
    return {
        "latency_us": float(microseconds.mean()),
        "min_us": float(microseconds.min()),
        "max_us": float(microseconds.max()),
    }


def overlap_percent(overall: float, compute: float, pure: float) -> float:
    """How much of an operation, which alone takes `pure`, was hidden behind the computing."""
    return min(max(0.0, 100 - (overall - compute) / pure * 100), 100.0)


def _overlap(start: Callable[[], Any], iterations: int, warmup: int, world: World) -> dict[str, float]:
    """Time the operation alone, then computing that takes as long, then both at once."""
    barrier = world.control.Barrier
    pure = float(call_times(lambda: start().wait(), iterations, warmup, barrier, separate=True).mean())
    computation = Computation(pure)
    compute = float(call_times(computation, iterations, warmup, barrier, separate=True).mean())
    both = overlapped_times(start, computation, iterations, warmup, barrier)
    mine = [pure, compute, float(both.overall.mean()), float(both.start.mean()), float(both.wait.mean())]
    by_rank = world.gather(mine) * 1e6
    pure_us, compute_us, overall_us, init_us, wait_us = map(float, by_rank.mean(axis=0))
    return {
        "overall_us": overall_us,
        "compute_us": compute_us,
        "init_us": init_us,
        "test_us": 0.0,  # nothing is tested for: a worker thread, or MPI itself, makes the progress
        "wait_us": wait_us,
        "pure_us": pure_us,
        "min_us": float(by_rank[:, 0].min()),
        "max_us": float(by_rank[:, 0].max()),
        "overlap_percent": overlap_percent(overall_us, compute_us, pure_us),
    }


def _validate(exchange: Exchange, nonblocking: bool, world: World) -> str:
    """What is wrong with the result, on the first rank where something is; '' if nothing is."""
    wrong = ""
    for round_ in _ROUNDS:
        _clear(exchange)
        if exchange.source is not None and exchange.given is not None:
            exchange.source.write(exchange.given(round_))
        world.control.Barrier()
        work = exchange.call()
        if nonblocking:
            work.wait()
        if not wrong and exchange.result is not None and exchange.wanted is not None:
            wrong = _difference(exchange.result.read(), exchange.wanted(round_))
    return next((f"rank {rank} got {text}" for rank, text in enumerate(world.control.allgather(wrong)) if text), "")


def _difference(got: np.ndarray, wanted: np.ndarray) -> str:
    if got.shape != wanted.shape:
        return f"{got.size} elements in place of {wanted.size}"
    places = np.flatnonzero(got != wanted)
    if not places.size:
        return ""
    place = int(places[0])
    return f"{got[place]:g} for {wanted[place]:g} as element {place}, and {places.size} wrong ones in all"


def _clear(exchange: Exchange) -> None:
    """Zeros, which no round of values has, and which stay what they are however often they are summed."""
    for buffer in (exchange.source, exchange.result):
        if buffer is not None:
            values = buffer.read()
            buffer.write(np.zeros(values.shape, values.dtype))


def _synchronized(exchange: Exchange, nonblocking: bool) -> Exchange:
    """On a GPU, a blocking call is over when the device has done it."""
    on_gpu = any(buffer is not None and buffer.tensor.is_cuda for buffer in (exchange.source, exchange.result))
    if nonblocking or not on_gpu:
        return exchange
    call = exchange.call

    def call_and_synchronize() -> None:
        call()
        torch.cuda.synchronize()

    return Exchange(call_and_synchronize, exchange.source, exchange.given, exchange.result, exchange.wanted)


def _labelled(contenders: list[Contender]) -> dict[str, Contender]:
    """Short names: of what differs between them."""
    transports = {contender.transport for contender in contenders}
    buffers = {contender.buffer for contender in contenders}

    def label(contender: Contender) -> str:
        buffer = BufferKind(contender.buffer).label
        if len(buffers) == 1:
            return contender.transport
        return buffer if len(transports) == 1 else f"{contender.transport}/{buffer}"

    return {label(contender): contender for contender in contenders}


def _words(contender: Contender, device: str) -> str:
    kind = BufferKind(contender.buffer)
    if kind.pickles:
        return "pickled arrays through mpi4py's lower-case methods"
    memory = f"{kind.name} buffers" + (f" on {device}" if kind.name == "torch" and device != "cpu" else "")
    through = {
        "mpi": "torch.distributed over Echelon's group on MPI",
        "gloo": "torch.distributed over Gloo",
        "raw": "mpi4py alone",
    }
    return f"{memory} through {through[contender.transport]}"
