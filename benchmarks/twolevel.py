"""An all_reduce in two levels on emulated clusters: `python benchmarks/twolevel.py` (as root, with iproute2).

On 2x2@1gbit and 4x2@1gbit, 1 to 64 MiB: two levels, over MPI and over Gloo, beside flat Gloo, a flat ring over MPI, and
what MPI chooses itself. The time of the slowest rank, of what the link needs for what must cross it; the bytes that the
busiest node sent, by its interface's own counter, of 2(n−1)/n × the size for n nodes. They take turns.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from turns import in_worlds, interval, summary, take_turns

MIB = 2**20
CLUSTERS = ("2x2@1gbit", "4x2@1gbit")
SIZES = (1, 4, 16, 64)  # MiB
ROUNDS = {1: 15, 4: 11, 16: 9, 64: 5}
RATE = 10**9  # bits a second
ROADS = {
    "mpi+two-level": "two levels, MPI",
    "gloo+two-level": "two levels, Gloo",
    "gloo": "flat Gloo",
    "mpi+ring": "flat MPI (ring)",
    "mpi": "MPI's own choice",
}
FLAT = ("gloo", "mpi+ring", "mpi")
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def as_rank(part: Path) -> None:
    import torch
    import torch.distributed as dist

    import echelon

    dist.init_process_group("echelon")
    nodes = dist.group.WORLD.place.nodes
    groups = {road: dist.new_group() for road in ROADS}
    for road, group in groups.items():
        echelon.comm.route(group, all_reduce=road)
    result = {}
    for size in SIZES:
        x = torch.zeros(size * MIB // 4)
        calls = {road: partial(dist.all_reduce, x, group=group) for road, group in groups.items()}
        times = take_turns(calls, ROUNDS[size])
        must = 2 * (nodes - 1) / nodes * x.nbytes
        limit = must * 8 / RATE * 1e3
        best = min(FLAT, key=lambda road: summary(times[road])["ms"])
        faster = [theirs / ours for theirs, ours in zip(times[best], times["mpi+two-level"], strict=True)]
        result[size] = {
            road: {name: of / limit for name, of in summary(times[road]).items()} | {"sent": sent(calls[road]) / must}
            for road in ROADS
        } | {"limit, ms": limit, "best of the others": best, "faster": interval(faster)}
    if dist.get_rank() == 0:
        part.write_text(json.dumps(result))
    dist.destroy_process_group()


def sent(call: Any) -> float:
    """Bytes that the busiest node sends for one call."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    before = int(SENT.read_text())
    dist.barrier()
    call()
    dist.barrier()
    crossed = torch.tensor([int(SENT.read_text()) - before])
    dist.all_reduce(crossed, dist.ReduceOp.MAX)
    return float(crossed)


def show(cluster: str, sizes: dict[str, Any]) -> None:
    print(f"{cluster}: all_reduce, time of the link's limit ± quartiles' distance (bytes of what must cross)")
    for size, row in sizes.items():
        low, ratio, high = row["faster"]
        cells = [
            f"{name} {row[road]['ms']:.2f} ± {row[road]['spread']:.2f} ({row[road]['sent']:.2f})"
            for road, name in ROADS.items()
        ]
        print(f"{size:>3} MiB  {' | '.join(cells)}")
        others = ROADS[row["best of the others"]]
        print(f"{'':9}over MPI, times faster than {others}: {ratio:.2f} ({low:.2f}–{high:.2f})", flush=True)


if __name__ == "__main__":
    in_worlds(__file__, __doc__, {cluster: {"cluster": cluster} for cluster in CLUSTERS}, as_rank, show)
