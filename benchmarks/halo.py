"""The exchange of borders beside MPI alone: `python benchmarks/halo.py`.

Images of 1024 × 1024 in 4 vertical parts, one a rank, of which each wants 3 columns of its neighbours. In turns, in one
run: `spatial`'s exchange, forward and with its backward pass, in which what others learned is added to the gradient of
a tile; a raw exchange of as many bytes by mpi4py, from and to buffers that are packed already; and the same with what
has to be done in any case, columns packed before and, for a backward pass, added up after it. Medians, and the spread
of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RANKS, SIDE, HALO = 4, 1024, 3
SHAPES = {"3 channels": 3, "64 channels": 64}
ROUNDS, REPEATS = 15, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/halo.json", help="where to write")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.json)
        return
    from echelon.launch.find import find
    from echelon.launch.start import Job, run

    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = run(Job(RANKS, [sys.executable, __file__, "--rank", "--json", str(arguments.json.absolute())]), find())
    sys.exit(code)


def measure(file: Path) -> None:
    import torch
    import torch.distributed as dist

    import echelon  # noqa: F401 (registers the backend, where it is not installed)
    from echelon.launch.find import find

    dist.init_process_group("echelon")
    cores = len(os.sched_getaffinity(0))
    about = {"what": __doc__.splitlines()[0], "mpi": find().version, "torch": torch.__version__, "cores": cores}
    found: dict[str, Any] = about | {"ranks": RANKS}
    for name, channels in SHAPES.items():
        found[name] = beside(channels)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found, indent=1) + "\n")
        for name in SHAPES:
            print(name, json.dumps(found[name]))
    dist.destroy_process_group()


def beside(channels: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from echelon.parallel.spatial.cut import bounds, within
    from echelon.parallel.spatial.exchange import arrived, began

    group, me = dist.group.WORLD, dist.get_rank()
    assert group is not None
    held = bounds(SIDE, RANKS)
    wanted = tuple(
        (within(range(has.start - HALO, has.start), SIDE), within(range(has.stop, has.stop + HALO), SIDE))
        for has in held
    )
    tile = torch.randn(1, channels, SIDE, len(held[me]), requires_grad=True)
    gradient = torch.randn_like(tile)
    neighbours = [each for each in (me - 1, me + 1) if 0 <= each < RANKS]
    edges = [range(HALO) if each < me else range(len(held[me]) - HALO, len(held[me])) for each in neighbours]
    packed = [torch.zeros(1, channels, SIDE, HALO) for _ in neighbours]
    arriving = [torch.zeros(1, channels, SIDE, HALO) for _ in neighbours]
    upstream = [torch.ones(1, channels, SIDE, len(each)) for each in wanted[me]]

    def forward() -> None:
        with torch.no_grad():
            _, token, journey = began(tile, 3, SIDE, wanted, group)
            arrived(token, journey)

    def and_back() -> None:
        kept, token, journey = began(tile, 3, SIDE, wanted, group)
        torch.autograd.grad([kept, *arrived(token, journey)], tile, [gradient, *upstream])

    def raw() -> None:
        requests = [MPI.COMM_WORLD.Irecv(x.numpy(), each) for x, each in zip(arriving, neighbours, strict=True)]
        requests += [MPI.COMM_WORLD.Isend(x.numpy(), each) for x, each in zip(packed, neighbours, strict=True)]
        MPI.Request.Waitall(requests)

    @torch.no_grad()
    def raw_packing() -> None:
        for x, edge in zip(packed, edges, strict=True):
            x.copy_(tile.narrow(3, edge.start, HALO))
        raw()

    @torch.no_grad()
    def raw_and_back() -> None:
        raw_packing()
        raw()
        for x, edge in zip(arriving, edges, strict=True):
            gradient.narrow(3, edge.start, HALO).add_(x)

    ways: dict[str, Callable[[], None]] = {
        "forward": forward,
        "raw MPI": raw,
        "raw MPI and packing": raw_packing,
        "forward and back": and_back,
        "raw MPI and packing, forward and back": raw_and_back,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, once in ways.items():
            once()
            dist.barrier()
            started = time.perf_counter()
            for _ in range(REPEATS):
                once()
            taken = torch.tensor((time.perf_counter() - started) / REPEATS)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[way].append(taken.item())
    medians = {way: statistics.median(of) for way, of in times.items()}
    spread = {way: (min(of) * 1e6, max(of) * 1e6) for way, of in times.items()}
    return {
        "bytes to each neighbour": packed[0].nbytes,
        "µs": {way: of * 1e6 for way, of in medians.items()},
        "least and most, µs": spread,
        "forward, times": {way: medians["forward"] / medians[way] for way in ("raw MPI", "raw MPI and packing")},
        "and back, times": medians["forward and back"] / medians["raw MPI and packing, forward and back"],
    }


if __name__ == "__main__":
    main()
