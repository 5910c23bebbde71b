"""Training a small GPT on two ranks, over Echelon and over Gloo: `python benchmarks/train.py` (as root).

Starts its own ranks, first on this machine, then on an emulated cluster of two nodes joined by 1 Gbit/s. Three equal
models learn from the same samples: one as Echelon trains; one as PyTorch's users train over Gloo, by DDP; and one by
Echelon's strategy, but with gradients summed over Gloo, which compares what carries the bytes alone (the 8 bytes that
make the norm go over Echelon there). Their steps take turns, and a time is that of the slowest rank; medians, with the
distance between the quartiles, and of each turn the ratios to Echelon's.
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
SHAPE = {"vocabulary": 4096, "context": LENGTH, "dim": 256, "layers": 4, "heads": 8}
PEERS = ("ddp over gloo", "the same over gloo")


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
    gloo = dist.new_group(backend="gloo")
    over_gloo = DeviceMesh.from_group(gloo, "cpu", mesh_dim_names=("data",))
    steps = {
        "echelon": prepared(grid),
        "ddp over gloo": prepared_ddp(grid, gloo),
        "the same over gloo": prepared(replace(grid, meshes={**grid.meshes, "data": over_gloo})),
    }
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
    if max(abs(loss / losses["echelon"] - 1) for loss in losses.values()) > 1e-3:
        raise RuntimeError(f"they have not learned the same: {losses}")
    result: dict[str, Any] = {name: summary(each) | {"loss": losses[name]} for name, each in times.items()}
    for name in PEERS:
        ratios = [theirs / ours for ours, theirs in zip(times["echelon"], times[name], strict=True)]
        result[name]["times faster"] = summary(ratios)
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

    model = parallelize(GPT(GPTConfig(**SHAPE)), grid, Strategies())
    optimizer = Optimizer(partial(torch.optim.AdamW, lr=1e-3, fused=True), model)
    given = own_samples(grid)

    def step() -> float:
        loss: torch.Tensor = model(**given) / batch.count(given["targets_BS"], grid.mesh("data"))
        loss.backward()
        optimizer.step(max_norm=1.0)
        return loss.item()

    return step


def prepared_ddp(grid: Any, gloo: Any) -> Callable[[], float]:
    """The same by PyTorch's own means, with their defaults."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from echelon.models.gpt import GPT, GPTConfig

    model = DistributedDataParallel(GPT(GPTConfig(**SHAPE)), process_group=gloo)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    given = own_samples(grid)

    def step() -> float:
        loss: torch.Tensor = model(**given) / given["targets_BS"].numel()  # DDP takes the mean over the ranks
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() / gloo.size()

    return step


def own_samples(grid: Any) -> dict[str, Any]:
    import torch

    from echelon.parallel import batch

    tokens = torch.randint(SHAPE["vocabulary"], (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return batch.part({"tokens_BS": tokens[:, :-1], "targets_BS": tokens[:, 1:]}, grid)


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
    for column in ("", "Echelon, ms", *(text for name in PEERS for text in (f"{name}, ms", "times faster"))):
        table.add_column(column, justify="right" if column else "left")
    for place, row in result.items():
        cells = [f"{row['echelon']['median']:.0f} ± {row['echelon']['spread']:.0f}"]
        for name in PEERS:
            ratio = row[name]["times faster"]
            cells += [f"{row[name]['median']:.0f} ± {row[name]['spread']:.0f}"]
            cells += [f"{ratio['median']:.2f} ± {ratio['spread']:.2f}"]
        table.add_row(place, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
