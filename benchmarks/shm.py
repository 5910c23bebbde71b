"""An all_reduce through memory that the ranks of a node share: `python benchmarks/shm.py`. Starts its own ranks.

On 2 and on 4 ranks, 64 KiB to 64 MiB: the road `mpi+shared` beside MPI's own all_reduce, and beside a plain copy of the
tensor by all ranks at once, which is about what must be moved. They take turns; a time is that of the slowest rank.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from turns import in_worlds, interval, summary, take_turns

KIB = 2**10
SIZES = [64 * KIB * 4**power for power in range(6)]
ROUNDS = 21
ROADS = ("mpi+shared", "mpi")


def as_rank(part: Path) -> None:
    import torch
    import torch.distributed as dist

    import echelon

    dist.init_process_group("echelon")
    groups = {road: dist.new_group() for road in ROADS}
    for road, group in groups.items():
        echelon.comm.route(group, all_reduce=road)
    result = {}
    for size in SIZES:
        x, y = torch.zeros(size // 4), torch.zeros(size // 4)
        calls = {road: partial(dist.all_reduce, x, group=group) for road, group in groups.items()}
        times = take_turns(calls | {"copy": partial(y.copy_, x)}, ROUNDS)
        faster = [theirs / ours for theirs, ours in zip(times["mpi"], times["mpi+shared"], strict=True)]
        result[size] = {name: summary(took) for name, took in times.items()} | {"faster": interval(faster)}
    if dist.get_rank() == 0:
        part.write_text(json.dumps(result))
    dist.destroy_process_group()


def show(title: str, sizes: dict[str, Any]) -> None:
    print(f"{title}: all_reduce, fp32, ms", file=sys.stdout)
    print(f"{'KiB':>8} {'shared':>16} {'MPI':>16} {'a copy':>10} {'faster than MPI (95 %)':>26} {'of a copy':>10}")
    for size, row in sizes.items():
        ours, theirs, copy = (row[name] for name in (*ROADS, "copy"))
        low, ratio, high = row["faster"]
        times = " ".join(f"{of['ms']:>8.3f} ± {of['spread']:<5.3f}" for of in (ours, theirs))
        faster = f"{ratio:.2f} ({low:.2f}–{high:.2f})"
        print(
            f"{int(size) // KIB:>8} {times} {copy['ms']:>10.3f} {faster:>26} {ours['ms'] / copy['ms']:>10.1f}",
            flush=True,
        )


if __name__ == "__main__":
    in_worlds(__file__, __doc__, {f"{ranks} ranks": {"ranks": ranks} for ranks in (2, 4)}, as_rank, show)
