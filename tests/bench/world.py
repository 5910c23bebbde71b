"""What ranks of the pool do in these tests."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import torch.distributed as dist

from echelon.bench import engine, rank
from echelon.bench.catalogue import find
from echelon.bench.operation import Benchmark, Case, Exchange
from echelon.bench.options import Options
from echelon.comm.world import mpi_world
from tests.rank import gloo


@cache
def world() -> engine.World:
    """As `engine.join` makes it, but once for all tests, and with the pool's own group over Gloo."""
    comm = mpi_world()
    groups = {"mpi": dist.group.WORLD, "gloo": gloo()}
    return engine.World(comm.Get_rank(), comm.Get_size(), comm.Dup(), comm.Dup(), groups)


def printed(text: str) -> tuple[str, bool]:
    """What running these options prints on this rank, and whether it failed."""
    options = Options.from_text(text)
    options.check(world().ranks)
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()):
        failed = rank.run_one(find(options.name), options, world())
    return output.getvalue(), failed


def idle(benchmark: Benchmark) -> Benchmark:
    """The same, but the operation does nothing."""

    def prepare(case: Case) -> Exchange:
        return replace(benchmark.prepare(case), call=lambda: SimpleNamespace(wait=lambda: None))

    return replace(benchmark, prepare=prepare)


def failures_when_idle(names: list[str]) -> dict[str, str]:
    """What validation says of operations that do nothing."""
    found = {}
    for name in names:
        options = Options(name, 64, 64, 1, 0, validate=True)
        rows = list(engine.rows(idle(find(name)), options, world()))
        found[name] = rows[1] if len(rows) == 2 else ""
    return found
