"""Where the microseconds of a 4-byte all_reduce go: `echelon run -n 2 benchmarks/overhead.py`.

Beside raw mpi4py and Echelon stand a group that does nothing (what PyTorch's own front end costs) and the leanest
group that still calls MPI: it knows the dtype and the operation beforehand, reads no options and keeps no order. And,
a part of Echelon's, the choice of a road by a table of twelve sizes. They take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from echelon.comm.group import EchelonGroup
from echelon.comm.routes import Road, Router, Rule, Table

ROUNDS, REPEATS = 40, 500


class Nothing(EchelonGroup):
    def allreduce(self, tensors: Any, opts: Any = None) -> None:
        return None


class Leanest(EchelonGroup):
    def allreduce(self, tensors: Any, opts: Any = None) -> None:
        [tensor] = tensors
        buffer = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, (buffer, MPI.FLOAT), MPI.SUM)


def calls() -> dict[str, Callable[[], object]]:
    world = dist.group.WORLD
    tensor, array = torch.ones(1), np.ones(1, np.float32)
    contenders: dict[str, Callable[[], object]] = {"raw mpi4py": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)}
    for name, kind in (("a group that does nothing", Nothing), ("the leanest group", Leanest)):
        ranks = dist.get_process_group_ranks(world)
        group = kind(name, ranks, world._roads, world._router, world.get_group_store(), timedelta(minutes=1))
        dist.distributed_c10d._world.pg_map[group] = ("echelon", world.get_group_store())
        contenders[name] = lambda group=group: dist.all_reduce(tensor, group=group)
    contenders["Echelon"] = lambda: dist.all_reduce(tensor, group=world)
    steps = tuple((4**power if power else 0, Road("mpi", "ring" if power % 2 else "")) for power in range(12))
    router = Router(Table((Rule("all_reduce", world.size(), 1, steps),)), world.place)
    contenders["the choice of a road"] = lambda: world._roads.opened(router.on_cpu.road("all_reduce", tensor.nbytes))
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    dist.init_process_group("echelon")
    contenders = calls()
    gc.disable()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(REPEATS):
                call()
            seconds[name].append((time.perf_counter() - start) / REPEATS)
    if dist.get_rank() == 0:
        result = {
            name: dict(zip(("least", "median", "upper quartile"), _figures(row), strict=True))
            for name, row in seconds.items()
        }
        for name, row in result.items():
            print(f"{name:26s}" + "".join(f"  {key} {value:5.1f} µs" for key, value in row.items()))
        if arguments.json:
            arguments.json.write_text(
                json.dumps({"what": __doc__.splitlines()[0], "µs": result}, indent=1, ensure_ascii=False) + "\n"
            )


def _figures(row: list[float]) -> tuple[float, ...]:
    return tuple(float(value) * 1e6 for value in np.percentile(row, [0, 50, 75]))


if __name__ == "__main__":
    main()
