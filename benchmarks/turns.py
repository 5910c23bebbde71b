"""Contenders that take turns, for the benchmarks of routes: whatever else the machine does hits all of them alike."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[[], object]
Rounds = dict[str, list[float]]
_SAMPLE_SECONDS = 5e-3  # what short calls take together before the clock is read again


def take_turns(calls: dict[str, Call], rounds: int) -> Rounds:
    """Milliseconds of a call on the slowest rank, for every contender, round by round. Called by all ranks alike."""
    import torch
    import torch.distributed as dist

    def once(call: Call, repeats: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) / repeats * 1e3

    def slowest(times: list[list[float]]) -> list[list[float]]:
        table = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        return table.tolist()

    for call in calls.values():
        call()
    [first] = slowest([[once(call, 1) for call in calls.values()]])
    repeats = max(1, min(100, int(_SAMPLE_SECONDS * 1e3 / min(first))))
    names = list(calls)
    times = []
    order = random.Random(0)
    for _ in range(rounds):  # in another order each time: nobody always comes after the same one
        turn = order.sample(names, len(names))
        took = {name: once(calls[name], repeats) for name in turn}
        times.append([took[name] for name in names])
    return {name: list(column) for name, column in zip(names, zip(*slowest(times), strict=True), strict=True)}


def summary(times: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"ms": median, "spread": high - low}


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """The median of paired ratios, and where it lies with 95 %, by drawing from them again."""
    choice = random.Random(0)
    medians = sorted(statistics.median(choice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], statistics.median(ratios), medians[int(0.975 * draws)]


def on_ranks(script: str, *arguments: str, ranks: int = 0, cluster: str = "") -> Any:
    """What rank 0 of a job writes: `script --rank FILE ARGUMENTS` on so many ranks, or on an emulated cluster."""
    sys.path.insert(0, str(ROOT))
    from echelon.launch.cluster import ClusterSpec, NoCluster
    from echelon.launch.find import find
    from echelon.launch.start import Job, run

    os.environ["PYTHONPATH"] = str(ROOT)
    spec = ClusterSpec.parse(cluster) if cluster else None
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, script, "--rank", str(part), *arguments]
        try:
            code = run(Job(spec.ranks if spec else ranks, command, cluster=spec), find())
        except NoCluster as error:
            sys.exit(str(error))
        if code:
            sys.exit(code)
        return json.loads(part.read_text())


def in_worlds(
    script: str,
    words: str,
    worlds: dict[str, dict[str, Any]],
    as_rank: Callable[[Path], None],
    show: Callable[[str, Any], None],
) -> None:
    """What a benchmark does in several worlds, each with its arguments of `on_ranks`: run, show, and write it all."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        as_rank(arguments.rank)
        return
    result: dict[str, Any] = {"what": words.splitlines()[0]}
    for world, where in worlds.items():
        result[world] = on_ranks(script, **where)
        show(world, result[world])
    if arguments.json:
        arguments.json.write_text(json.dumps(result | machine(), indent=1) + "\n")


def machine() -> dict[str, Any]:
    import torch

    from echelon.launch.find import find

    return {"mpi": find().version, "torch": torch.__version__, "cores": os.cpu_count()}
