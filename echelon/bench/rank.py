"""What every rank does: run one benchmark, print its table, and write what was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

import echelon
from echelon.bench import catalogue, engine, suite
from echelon.bench.operation import WINDOW, Benchmark
from echelon.bench.options import TRANSPORTS, Options
from echelon.bench.result import Result, Row
from echelon.bench.table import Table


def main(options: Options) -> int:
    """Run what was asked for, on this rank; the exit code is 1 if something did not pass validation."""
    world = engine.join(options.transports)
    options.check(world.ranks)
    if options.name == catalogue.ALL:
        failed = suite.run(options, world)
    else:
        failed = run_one(catalogue.find(options.name), options, world)
    dist.destroy_process_group()
    return int(failed)


def run_one(benchmark: Benchmark, options: Options, world: engine.World) -> bool:
    """Run and print one benchmark; True if it did not pass validation."""
    result = engine.begin(benchmark, options, world)
    table = Table(result, benchmark.sized, options.full, options.validate)
    first = world.rank == 0
    if first:
        pairs = world.ranks // 2 if benchmark.columns == "rate" else None
        for line in table.header(echelon.__version__, transports(options, benchmark), pairs, WINDOW):
            print(line, flush=True)
    for row in engine.rows(benchmark, options, world):
        if isinstance(row, Row):
            result.rows.append(row)
            if first:
                print(table.line(row), flush=True)
        else:
            result.failure = row
    if first:
        _write(result, options)
        if result.failure:
            print(f"echelon: DATA VALIDATION ERROR: {result.failure}", file=sys.stderr, flush=True)
    return bool(result.failure)


def transports(options: Options, benchmark: Benchmark) -> str:
    """What moves the bytes, as it stands in the first line; OMB's own form is `MPI`, or `MPI-CUDA`."""
    used = dict.fromkeys(contender.transport for contender in options.contenders(benchmark))
    suffix = "-CUDA" if options.device == "cuda" else ""
    return ", ".join(TRANSPORTS[transport] + suffix for transport in used)


def _write(result: Result, options: Options) -> None:
    if options.json:
        result.write(Path(options.json))
    if options.plot:
        from echelon.bench.plot import draw

        draw([result], Path(options.plot))
