"""Training a small GPT on two ranks, over Echelon and over Gloo: `python benchmarks/train.py` (as root).

Starts its own ranks, first on this machine, then on an emulated cluster of two nodes joined by 1 Gbit/s. Two equal
models learn from the same samples; the gradients of one are summed over Echelon, those of the other over Gloo (the one
number of 8 bytes that makes the norm goes over Echelon for both). Their steps take turns, and a time is that of the
slowest rank; medians, with the distance between the quartiles, and of each turn the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PLACES = ("", "2x1@1gbit")  # here, and on a cluster
ROUNDS, WARMUP = 41, 3
BATCH, LENGTH = 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"steps of each (default: {ROUNDS})")
    parser.add_argument("--here", action="store_true", help="without the cluster, which needs root")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # where a started rank writes
    arguments = parser.parse_args()
    if arguments.rank:
        as_rank(arguments.rank, arguments.rounds)
        return
    import torch

    from echelon.launch.find import find

    about = {"what": __doc__.splitlines()[0], "mpi": find().version, "torch": torch.__version__}
    about |= {"cores": os.cpu_count(), "batch": BATCH, "length": LENGTH, "rounds": arguments.rounds}
    places = PLACES[:1] if arguments.here else PLACES
    result = {place or "2 ranks here": started(place, arguments.rounds) for place in places}
    print_table(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"places": result}, indent=1) + "\n")


def started(place: str, rounds: int) -> dict[str, Any]:
    from echelon.launch.cluster import ClusterSpec, NoCluster
    from echelon.launch.find import find
    from echelon.launch.start import Job, run

    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--rank", str(part), "--rounds", str(rounds)]
        try:
            code = run(Job(2, command, cluster=ClusterSpec.parse(place) if place else None), find())
        except NoCluster as error:
            sys.exit(str(error))
        if code:
            sys.exit(code)
        told: dict[str, Any] = json.loads(part.read_text())
        return told


def as_rank(part: Path, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    import echelon  # noqa: F401 (registers the backend, where it is not installed)
    from echelon.parallel.layout import Layout

    torch.set_num_threads(1)
    dist.init_process_group("echelon")
    grid = Layout(dp=2).build()
    over_gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu", mesh_dim_names=("data",))
    grids = {"echelon": grid, "gloo": replace(grid, meshes={**grid.meshes, "data": over_gloo})}
    steps = {name: prepared(each) for name, each in grids.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for turn in range(WARMUP + rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name] = step()
            took = largest(time.perf_counter() - start) * 1e3
            if turn >= WARMUP:
                times[name].append(took)
    if abs(losses["echelon"] / losses["gloo"] - 1) > 1e-3:
        raise RuntimeError(f"the two have not learned the same: {losses}")
    result: dict[str, Any] = {name: summary(each) | {"loss": losses[name]} for name, each in times.items()}
    result["times faster"] = summary([g / e for e, g in zip(times["echelon"], times["gloo"], strict=True)])
    if dist.get_rank() == 0:
        part.write_text(json.dumps(result))
    dist.destroy_process_group()


def prepared(grid: Any) -> Callable[[], float]:
    """A step of training, ready to be called; it returns this rank's part of the loss."""
    import torch

    from echelon.models.gpt import GPT, GPTConfig
    from echelon.parallel import batch
    from echelon.parallel.apply import Strategies, parallelize
    from echelon.parallel.optimizer import Optimizer

    model = parallelize(GPT(GPTConfig(vocabulary=4096, context=LENGTH, dim=256, layers=4, heads=8)), grid, Strategies())
    optimizer = Optimizer(partial(torch.optim.AdamW, lr=1e-3, fused=True), model)
    tokens = torch.randint(4096, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    given = batch.part({"tokens_BS": tokens[:, :-1], "targets_BS": tokens[:, 1:]}, grid)

    def step() -> float:
        loss: torch.Tensor = model(**given) / batch.count(given["targets_BS"], grid.mesh("data"))
        loss.backward()
        optimizer.step(max_norm=1.0)
        return loss.item()

    return step


def largest(value: float) -> float:
    """Over all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def summary(figures: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(figures, n=4)
    return {"median": median, "spread": high - low}


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="a training step of two ranks", title_justify="left")
    for column in ("", "Echelon, ms", "Gloo, ms", "times faster"):
        table.add_column(column, justify="right" if column else "left")
    for place, row in result.items():
        cells = [f"{row[name]['median']:.0f} ± {row[name]['spread']:.0f}" for name in ("echelon", "gloo")]
        ratio = row["times faster"]
        table.add_row(place, *cells, f"{ratio['median']:.2f} ± {ratio['spread']:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
