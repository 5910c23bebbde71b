"""Every collective over Echelon, over Gloo and over raw mpi4py, in one run: `echelon run -n 2
benchmarks/collectives.py`.

Contenders take turns, round by round, so that whatever else the machine does hits all of them. A round's time is that
of the slowest rank; the figure is the median over the rounds, the spread the distance between its quartiles. Ratios
are taken inside the run.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

CONTENDERS = ("echelon", "gloo", "raw")
ROUNDS = 15
ROUND_SECONDS = 0.02
TARGETS = (
    "to reach for all_reduce: ≥ 20 × Gloo up to 4 KiB, ≥ 2 × from 1 to 16 MiB; "
    "≤ 8 µs over raw when small, ≤ 1.15 × raw from 1 MiB"
)


@dataclass(frozen=True)
class Point:
    """One operation at one size: microseconds, median and interquartile range, for each contender."""

    operation: str
    bytes: int
    median: dict[str, float]
    spread: dict[str, float]

    @property
    def over_gloo(self) -> float:
        """How many times faster than Gloo."""
        return self.median["gloo"] / self.median["echelon"]


Call = Callable[[], object]


def calls(operation: str, size: int, gloo: dist.ProcessGroup) -> dict[str, Call]:
    """What each contender is to do. `size` is the tensor of an all_reduce, the whole output of an all_gather, the whole
    input of a reduce_scatter.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if operation.endswith("bf16") else torch.float32
    count = max(size // dtype.itemsize, 1)
    part = max(count // ranks, 1)
    peer = rank ^ 1
    raw = MPI.COMM_WORLD

    def tensor(n: int) -> torch.Tensor:
        return torch.ones(n, dtype=dtype)

    def over(group: dist.ProcessGroup | None) -> Call:
        x, other, piece, whole, whole_in = (tensor(n) for n in (count, count, part, part * ranks, part * ranks))
        pieces = list(tensor(part * ranks).chunk(ranks))
        at_root = pieces if rank == 0 else None

        def pingpong() -> None:
            if rank == 0:
                dist.send(x, peer, group)
            dist.recv(x, peer, group)
            if rank != 0:
                dist.send(x, peer, group)

        def swap() -> None:
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
            ):
                work.wait()

        return {
            "all_reduce": lambda: dist.all_reduce(x, group=group),
            "all_reduce_bf16": lambda: dist.all_reduce(x, group=group),
            "reduce": lambda: dist.reduce(x, 0, group=group),
            "broadcast": lambda: dist.broadcast(x, 0, group=group),
            "all_gather": lambda: dist.all_gather(pieces, piece, group=group),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, piece, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter(piece, pieces, group=group),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(piece, whole, group=group),
            "all_to_all_single": lambda: dist.all_to_all_single(whole, whole_in, group=group),
            "gather": lambda: dist.gather(piece, at_root, 0, group=group),
            "scatter": lambda: dist.scatter(piece, at_root, 0, group=group),
            "send_recv": pingpong,
            "batch_isend_irecv": swap,
            "barrier": lambda: dist.barrier(group),
        }[operation]

    # Raw mpi4py gets memory of the same kind: NumPy's own is on huge pages from 4 MiB, PyTorch's is not.
    a, b, p, w, w2 = (torch.ones(n).numpy() for n in (count, count, part, part * ranks, part * ranks))

    def raw_pingpong() -> None:
        if rank == 0:
            raw.Send(a, peer)
        raw.Recv(a, peer)
        if rank != 0:
            raw.Send(a, peer)

    raws: dict[str, Call] = {
        "all_reduce": lambda: raw.Allreduce(MPI.IN_PLACE, a),
        "reduce": lambda: raw.Reduce(MPI.IN_PLACE, a) if rank == 0 else raw.Reduce(a, None),
        "broadcast": lambda: raw.Bcast(a),
        "all_gather": lambda: raw.Allgather(p, w),
        "all_gather_into_tensor": lambda: raw.Allgather(p, w),
        "reduce_scatter": lambda: raw.Reduce_scatter_block(w, p),
        "reduce_scatter_tensor": lambda: raw.Reduce_scatter_block(w, p),
        "all_to_all_single": lambda: raw.Alltoall(w, w2),
        "gather": lambda: raw.Gather(p, w if rank == 0 else None),
        "scatter": lambda: raw.Scatter(w if rank == 0 else None, p),
        "send_recv": raw_pingpong,
        "batch_isend_irecv": lambda: raw.Sendrecv(a, peer, recvbuf=b, source=peer),
        "barrier": raw.Barrier,
    }
    contenders = {"echelon": over(None), "gloo": over(gloo)}
    return contenders | ({"raw": raws[operation]} if operation in raws else {})


OPERATIONS = (
    "all_reduce",
    "all_reduce_bf16",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "gather",
    "scatter",
    "send_recv",
    "batch_isend_irecv",
    "barrier",
)


def measure(operation: str, size: int, gloo: dist.ProcessGroup) -> Point:
    """Time all contenders in turn; every rank returns the same point."""
    contenders = calls(operation, size, gloo)
    repeats = {name: _repeats(call) for name, call in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            seconds[name].append(_time(call, repeats[name]))
    slowest = np.array([seconds[name] for name in contenders])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    median = {name: float(np.median(row)) * 1e6 for name, row in zip(contenders, slowest, strict=True)}
    spread = {
        name: float(np.subtract(*np.percentile(row, [75, 25]))) * 1e6
        for name, row in zip(contenders, slowest, strict=True)
    }
    return Point(operation, size, median, spread)


def _time(call: Call, repeats: int) -> float:
    MPI.COMM_WORLD.Barrier()
    gc.disable()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds / repeats


def _repeats(call: Call) -> int:
    """Warm up, and agree on how many calls fill a round."""
    once = max(_time(call, 2), _time(call, 3))
    return MPI.COMM_WORLD.allreduce(min(max(int(ROUND_SECONDS / once), 2), 1000), MPI.MIN)


def sizes(operation: str, largest: int) -> Iterator[int]:
    size = 4
    while size <= (4 if operation == "barrier" else largest):
        yield size
        size *= 4


def human(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or unit == "MiB":
            return f"{size} {unit}"
        size //= 1024
    raise AssertionError


def table(points: list[Point]) -> Table:
    result = Table(title=f"µs, median ± interquartile range; {TARGETS}", title_justify="left")
    for column in (
        "operation",
        "size",
        "Echelon",
        "Gloo",
        "raw mpi4py",
        "Gloo / Echelon",
        "Echelon − raw",
        "Echelon / raw",
    ):
        result.add_column(column, justify="left" if column == "operation" else "right")
    for point in points:
        cells = [
            f"{point.median[name]:,.1f} ± {point.spread[name]:,.1f}" if name in point.median else ""
            for name in CONTENDERS
        ]
        raw = point.median.get("raw")
        against_raw = (
            (f"{point.median['echelon'] - raw:+,.1f}", f"{point.median['echelon'] / raw:.2f}") if raw else ("", "")
        )
        result.add_row(point.operation, human(point.bytes), *cells, f"{point.over_gloo:.1f}", *against_raw)
    return result


def verdict(points: list[Point]) -> dict[str, object]:
    """The issue's targets, each with the worst figure seen."""
    small = [p for p in points if p.operation == "all_reduce" and p.bytes <= 4096]
    middle = [p for p in points if p.operation == "all_reduce" and 2**20 <= p.bytes <= 2**24]
    large = [p for p in points if p.operation == "all_reduce" and p.bytes >= 2**20]
    slowest = min(points, key=lambda p: p.over_gloo)
    return {
        "all_reduce up to 4 KiB: times faster than Gloo, at least": min((p.over_gloo for p in small), default=None),
        "all_reduce 1 to 16 MiB: times faster than Gloo, at least": min((p.over_gloo for p in middle), default=None),
        "all_reduce up to 4 KiB: µs over raw mpi4py, at most": max(
            (p.median["echelon"] - p.median["raw"] for p in small), default=None
        ),
        "all_reduce from 1 MiB: times raw mpi4py, at most": max(
            (p.median["echelon"] / p.median["raw"] for p in large), default=None
        ),
        "all operations: times faster than Gloo, at least": slowest.over_gloo,
        "all operations: where that was": f"{slowest.operation} {human(slowest.bytes)}",
        "all operations: geometric mean over Gloo": statistics.geometric_mean(p.over_gloo for p in points),
    }


def plot(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [name for name in OPERATIONS if name != "barrier" and any(p.operation == name for p in points)]
    columns = 4
    figure, axes = plt.subplots(
        -(-len(shown) // columns), columns, figsize=(16, 3 * -(-len(shown) // columns)), sharex=True, squeeze=False
    )
    colours = {"echelon": "tab:blue", "gloo": "tab:orange", "raw": "tab:gray"}
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, operation in zip(axes.flat, shown, strict=False):
        mine = [p for p in points if p.operation == operation]
        for name in CONTENDERS:
            if name in mine[0].median:
                label = "raw mpi4py" if name == "raw" else name.capitalize()
                axis.loglog(
                    [p.bytes for p in mine],
                    [p.median[name] for p in mine],
                    color=colours[name],
                    marker=".",
                    label=label,
                    base=2,
                )
        axis.set_yscale("log", base=10)
        axis.set_title(operation, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.supxlabel("bytes")
    figure.supylabel("µs (median)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--operations",
        nargs="+",
        default=OPERATIONS,
        choices=OPERATIONS,
        metavar="NAME",
        help=f"of {', '.join(OPERATIONS)}",
    )
    parser.add_argument("--largest", type=int, default=2**26, help="bytes of the largest message (default 64 MiB)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--plot", type=Path, help="where to draw it")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # torch 2.13 renames two operations
    dist.init_process_group("echelon")
    gloo = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    console = Console(quiet=rank != 0, width=150)
    todo = [(operation, size) for operation in arguments.operations for size in sizes(operation, arguments.largest)]
    points = []
    with Progress(console=console, transient=True, disable=rank != 0, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=len(todo))
        for operation, size in todo:
            progress.update(task, description=f"{operation} {human(size)}", refresh=True)
            points.append(measure(operation, size, gloo))
            progress.advance(task)
    console.print(table(points))
    result = {
        "what": __doc__.splitlines()[0],
        "ranks": dist.get_world_size(),
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread a rank",
        "verdict": verdict(points),
        "points": [asdict(point) | {"over_gloo": point.over_gloo} for point in points],
    }
    console.print_json(data=result["verdict"])
    if rank == 0 and arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if rank == 0 and arguments.plot:
        plot(points, arguments.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
