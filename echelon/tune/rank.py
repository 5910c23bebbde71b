"""What every rank of a tuning does: time each point over each road that could win it, and write the table.

For a point the roads take turns, round by round, so that whatever else the machine does hits all of them; a call's
time is that of its slowest rank. A road that is slow at first sight, or that was slow at smaller sizes and fell back
further, is not measured on. Ranks that have no part in a group wait without taking time from those that have.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from echelon.comm.measure import call_times
from echelon.comm.routes import NoRoute, Place, Road
from echelon.comm.start import refuse
from echelon.comm.tables import fingerprint, folder
from echelon.comm.torch_compat import choose_gpu, default_store, newest
from echelon.comm.world import mpi_world
from echelon.launch.say import bar_of_ranks
from echelon.tune.points import DTYPE, LOW_DTYPE, Point, candidates, questions, shapes, sizes_of
from echelon.tune.result import Figure, Figures, Part, table_of

Call = Callable[[], object]
_SAMPLE_SECONDS = 2e-3  # what a sample of short calls takes together
_POINT_SECONDS = 5.0  # what a point may take, if that leaves enough samples
_FEWEST_SAMPLES = 5
_HOPELESS = 2.0  # times the fastest, at first sight
_FALLING_BACK = 3.0  # times the fastest at the size before, and further off than at the one before that,
_BANDWIDTH = (
    2**16
)  # where both were so many bytes: below, a road may lose by its latency and win by its bandwidth later


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What was asked for."""

    output: str  # empty: only among the machine's own tables
    sizes: tuple[int, ...]
    operations: tuple[str, ...]
    device: str = "cpu"
    samples: int = 15
    terminal: int = 0  # columns of the terminal that the launcher writes to; 0 if it is none

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> TuneOptions:
        fields = json.loads(text)
        return TuneOptions(**fields | {name: tuple(fields[name]) for name in ("sizes", "operations")})


@dataclass(frozen=True, slots=True)
class Bench:
    """A group of the shape that is measured, and what its ranks time with."""

    group: Any
    control: Any  # an MPI communicator of its own
    device: torch.device

    @property
    def place(self) -> Place:
        place: Place = self.group.place
        return place

    def slowest(self, seconds: np.ndarray) -> np.ndarray:
        """By element, over the ranks."""
        result = np.empty_like(seconds)
        self.control.Allreduce(np.ascontiguousarray(seconds), result, op=MPI.MAX)
        return result


def main(options: TuneOptions) -> None:
    """Measure what is missing, then write the table."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    if options.device == "cuda":
        choose_gpu()
    dist.init_process_group("echelon")
    world: Any = dist.group.WORLD
    about = {"machine": fingerprint(), "ranks": world.size(), "nodes": world.place.nodes}
    name = f"{options.device}-{world.size()}-ranks-{world.place.nodes}-nodes"
    output = Path(options.output) if options.output else folder() / f"{name}.json"
    part = _begun(output, about | {"options": asdict(options) | {"terminal": 0}}) if world.rank() == 0 else None
    shared: list[Any] = [list(part.figures.items())] if part is not None else [None]
    dist.broadcast_object_list(shared)
    done: dict[Point, Figures] = dict(shared[0])
    todo = {tuple(members): _points(members, world.nodes, options) for members in shapes(world.nodes)}
    everything = [point for points in todo.values() for point in points]
    with bar_of_ranks(options.terminal, world.rank() == 0, width=42) as progress:
        task = progress.add_task("", total=len(everything), completed=len(done.keys() & everything))
        for members, points in todo.items():
            bench = _join(list(members), options.device)
            for point in points if bench is not None else ():
                if point not in done and bench is not None:
                    progress.update(task, description=str(point.question), refresh=True)
                    done[point] = _measure(point, bench, done, options.samples)
                    if part is not None:
                        part.add(point, done[point])
                    progress.update(task, advance=1, refresh=True)
            _meet(f"echelon/tune/{members}", wait=bench is None)
    if part is not None:
        table = table_of(part.figures, about).to_text()
        for path in (
            (output, folder() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json") if options.output else (output,)
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(table)
        part.path.unlink()
    dist.barrier()
    dist.destroy_process_group()


def _begun(output: Path, about: dict[str, Any]) -> Part:
    try:
        return Part(output, about)
    except (NoRoute, OSError) as error:
        refuse(str(error), 2)


def _points(members: Sequence[int], nodes: Sequence[int], options: TuneOptions) -> list[Point]:
    on = len({nodes[rank] for rank in members})
    asked = questions(len(members), on, options.device, options.operations)
    return [Point(question, size) for question in asked for size in sizes_of(question, options.sizes)]


def _join(members: list[int], device: str) -> Bench | None:
    """The group of these ranks, to its members; made by all."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    world = mpi_world()
    control = world.Create_group(world.Get_group().Incl(members))
    return Bench(group, control, torch.device(device))


def _meet(key: str, wait: bool) -> None:
    """When a group is done; those outside it look for the news now and then."""
    store = default_store()
    if dist.get_rank() == 0:
        store.set(key, "done")
    while wait and not store.check([key]):
        time.sleep(0.05)
    dist.barrier()


def _measure(point: Point, bench: Bench, done: dict[Point, Figures], samples: int) -> Figures:
    question, group = point.question, bench.group
    call = _call(point, bench)
    barrier = bench.control.Barrier
    roads = [road for road in candidates(question, bench.place) if not _falls_back(road, point, done)]

    def sample(road: Road, repeats: int) -> float:
        group.choose_roads({question.operation: road})
        return float(call_times(call, repeats, 0, barrier, separate=False).mean())

    first = {}
    for road in roads:
        try:
            sample(road, 1)  # opens the road
        except RuntimeError as error:  # on all ranks alike
            if dist.get_rank() == 0:
                print(f"echelon: {road} is left out: {error}", file=sys.stderr, flush=True)
            continue
        first[road] = float(bench.slowest(np.array([sample(road, 1) for _ in range(3)])).min())
    if not first:
        raise RuntimeError(f"no road could be taken for {question}")
    least = min(first.values())
    repeats = max(1, min(50, int(_SAMPLE_SECONDS / least)))
    left = [road for road in first if first[road] <= _HOPELESS * least]
    afford = int(_POINT_SECONDS / (repeats * sum(first[road] for road in left)))
    rounds = max(_FEWEST_SAMPLES, min(samples, afford))
    times = np.array([[sample(road, repeats) for road in left] for _ in range(rounds)])
    low, median, high = np.quantile(bench.slowest(times), (0.25, 0.5, 0.75), axis=0)
    found = {road: Figure(first[road], 0.0, 1) for road in first if road not in left}
    found |= {road: Figure(float(median[i]), float(high[i] - low[i]), rounds) for i, road in enumerate(left)}
    group.choose_roads({})
    return found


def _falls_back(road: Road, point: Point, done: dict[Point, Figures]) -> bool:
    """Whether it lost by much at the two sizes before this one, and by more at the larger."""
    if not point.question.sized:
        return False
    sizes = range(_BANDWIDTH, point.size)
    smaller = [other for other in done if other.question == point.question and other.size in sizes]
    lost = []
    for other in sorted(smaller, key=lambda other: other.size)[-2:]:
        figures = done[other]
        if road not in figures:
            return True  # given up before
        lost.append(figures[road].median / min(figure.median for figure in figures.values()))
    return len(lost) == 2 and lost[1] > _FALLING_BACK and lost[1] >= lost[0]


def _call(point: Point, bench: Bench) -> Call:
    """The operation with that payload, on tensors of its own."""
    question, group, ranks = point.question, bench.group, bench.place.ranks
    dtype: torch.dtype = getattr(torch, LOW_DTYPE if question.low else DTYPE)

    def tensor(size: int) -> torch.Tensor:
        return torch.zeros(max(size // dtype.itemsize, 1), dtype=dtype, device=bench.device)

    whole, piece = tensor(point.size), tensor(point.size // ranks)
    pieces = [torch.zeros_like(piece) for _ in range(ranks)]
    common: dict[str, Any] = {"group": group}
    first, me = dist.get_process_group_ranks(group)[0], group.rank()
    flat = torch.cat(pieces)
    calls: dict[str, Call] = {
        "all_reduce": partial(dist.all_reduce, whole, **common),
        "reduce": partial(dist.reduce, whole, first, **common),
        "broadcast": partial(dist.broadcast, whole, first, **common),
        "all_gather": partial(newest("all_gather_single", "all_gather_into_tensor"), flat, piece, **common),
        "reduce_scatter": partial(newest("reduce_scatter_single", "reduce_scatter_tensor"), piece, flat, **common),
        "all_to_all": partial(dist.all_to_all_single, torch.empty_like(flat), flat, **common),
        "all_to_all_v": partial(dist.all_to_all, [torch.empty_like(row) for row in pieces], pieces, **common),
        "gather": partial(dist.gather, piece, pieces if me == 0 else None, first, **common),
        "scatter": partial(dist.scatter, piece, pieces if me == 0 else None, first, **common),
        "barrier": partial(dist.barrier, **common),
        "message": partial(_there_and_back, whole, group),
    }
    call = calls[question.operation]
    if bench.device.type == "cpu":
        return call

    def call_and_synchronize() -> None:
        call()
        torch.cuda.synchronize()

    return call_and_synchronize


def _there_and_back(tensor: torch.Tensor, group: Any) -> None:
    """Between the group's first rank and its last."""
    members = dist.get_process_group_ranks(group)
    if group.rank() == 0:
        dist.send(tensor, members[-1], group)
        dist.recv(tensor, members[-1], group)
    elif group.rank() == len(members) - 1:
        dist.recv(tensor, members[0], group)
        dist.send(tensor, members[0], group)


if __name__ == "__main__":
    main(TuneOptions.from_text(sys.argv[1]))
