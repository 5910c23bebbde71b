"""What recording costs: `echelon run -n 2 benchmarks/recorder.py`.

A DDP step and a stream of small operations, with the recorder off, on in memory, and on into files, taking turns in one
run. The step is one of a small GPT-like stack, long enough that its time can be compared; figures are medians over the
rounds of the slowest rank's time, and the cost is that of recording over not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.comm.recorder import recorder
from echelon.comm.records import RecordWriter

STEPS, OPERATIONS, ROUNDS = 4, 2000, 41


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    dist.init_process_group("echelon")
    step = a_step()
    x = torch.ones(256)
    result = {
        "a DDP step": measured(step, STEPS),
        "a small all_reduce": measured(lambda: dist.all_reduce(x), OPERATIONS),
    }
    if dist.get_rank() == 0:
        show(result)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def a_step() -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(256, 512)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def to_files() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(Path(folder), dist.get_rank(), dist.get_world_size())
        recorder.attach(writer)
        try:
            yield
        finally:
            recorder.detach(writer)
            writer.close()


def measured(call: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Microseconds a call."""
    ways: dict[str, Callable[[], Any]] = {
        "off": contextlib.nullcontext,
        "in memory": echelon.comm.record,
        "into files": to_files,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS + 1):
        for way, recording in ways.items():
            with recording():
                taken = timed(call, repeats)
            if number:  # the first round warms up
                times[way].append(taken)
    quartiles = {way: statistics.quantiles(values, n=4) for way, values in times.items()}
    result: dict[str, Any] = {way: {"median": q[1], "spread": q[2] - q[0]} for way, q in quartiles.items()}
    for way in ("in memory", "into files"):
        # Of neighbours in time, so that a machine that changes its speed matters less.
        ratios = [on / off for on, off in zip(times[way], times["off"], strict=True)]
        result[way]["cost"] = statistics.median(ratios) - 1
    return result


def timed(call: Callable[[], object], repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    took = torch.tensor([(time.perf_counter() - start) / repeats * 1e6])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def show(result: dict[str, Any]) -> None:
    table = Table(title="µs a call (median ± spread between quartiles)", title_justify="left")
    for column in ("", "off", "recorded in memory", "cost", "recorded into files", "cost"):
        table.add_column(column, justify="right")
    for name, ways in result.items():
        cells = [f"{ways['off']['median']:,.1f} ± {ways['off']['spread']:,.1f}"]
        for way in ("in memory", "into files"):
            cells += [f"{ways[way]['median']:,.1f} ± {ways[way]['spread']:,.1f}", f"{ways[way]['cost']:+.1%}"]
        table.add_row(name, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
