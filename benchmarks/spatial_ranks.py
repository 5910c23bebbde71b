"""What each rank of `benchmarks/spatial.py` does, which starts them."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import echelon  # noqa: F401 (registers the backend, where it is not installed)
from echelon.models.amoebanet import AmoebaNet, AmoebaNetConfig
from echelon.models.presets import build
from echelon.parallel.apply import Strategies, parallelize, pipeline
from echelon.parallel.layout import Layout, Stage
from echelon.parallel.pipeline.partition import cut, linked, times_of
from echelon.parallel.spatial import exchange

MICROBATCHES, ROUNDS, HALO_ROUNDS = 8, 3, 9


def model_of(name: str) -> Any:
    if name == "resnet":
        return build("resnet50", classes=10)
    return AmoebaNet(AmoebaNetConfig(classes=10, layers=6, filters=64))


def given(side: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"images_BCHW": torch.randn(1, 3, side, side, generator=generator), "targets_B": torch.tensor([3])}


def tiled(name: str, sp: Any = None) -> Any:
    """Rows, one a rank, unless it is said otherwise."""
    return parallelize(model_of(name), Layout(sp=sp or dist.get_world_size()).build(), Strategies())


def memory(name: str, side: int, sp: Any = None) -> dict[str, Any]:
    model, batch = tiled(name, sp), given(side)
    kept = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in kept:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    before = resident()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model(**batch)
    loss.backward()
    return {"saved": sum(saved.values()), "peak": peak() - before}


def halo(name: str, side: int) -> dict[str, Any]:
    """Seconds of passes, and of those in which borders are packed, sent and waited for. The ways take turns."""
    model, batch, spent = tiled(name), given(side), [0.0]
    begin, receive = exchange._Journey._begin, exchange._Journey.receive

    def timed(once: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return once(*arguments, **named)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    def begin_and_wait(journey: Any, *arguments: Any, **named: Any) -> None:
        begin(journey, *arguments, **named)
        for work in journey._works:
            work.wait()
        journey._works = []

    exchange._Journey.receive = timed(receive)  # type: ignore[method-assign]
    ways = {"overlapped": timed(begin), "one after the other": timed(begin_and_wait)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    exchanges: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(HALO_ROUNDS + 1):
        for way, how in ways.items():
            exchange._Journey._begin = how  # type: ignore[method-assign]
            dist.barrier()
            spent[0], began = 0.0, time.perf_counter()
            model(**batch).backward()
            if number:  # the first warms up
                times[way].append(time.perf_counter() - began)
                exchanges[way].append(spent[0])
            model.zero_grad()
    return {way: {"passes": times[way], "exchanges": exchanges[way]} for way in ways}


def pipelined(name: str, side: int, tiles: bool) -> dict[str, Any]:
    with torch.device("meta"):
        plain = model_of(name)
        example = {key: each.to("meta") for key, each in given(side).items()}
    costs = times_of(linked(plain), example)
    if tiles:
        layout = Layout(stages=[Stage(sp=4), Stage()])
        ends = range(1, len(costs))
        first = min(ends, key=lambda end: max(sum(costs[:end]) / 4, sum(costs[end:])))
        balance = [first, len(costs) - first]
    else:
        layout = Layout(pp=5)
        balance = [len(span) for span in cut(costs, 5)]
    grid, strategies = layout.build(), Strategies(balance=balance)
    model = parallelize(model_of(name), grid, strategies)
    pipe = pipeline(model, grid, strategies, MICROBATCHES)
    times = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        pipe.run([given(side)] * MICROBATCHES, lambda out, _: out / MICROBATCHES)
        dist.barrier()
        times.append(time.perf_counter() - began)
        model.zero_grad()
        model.gradient_reducer.clear()
    return {"images/s": MICROBATCHES / statistics.median(times[1:]), "links": balance, "peak, MiB": peak() / 2**20}


def resident() -> int:
    """Bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most that they have been."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    part, name, side, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("echelon")
    if part in ("sp+pp", "pp"):
        found = pipelined(name, side, tiles=part == "sp+pp")
    else:
        ways = {"memory": memory, "memory of 2 × 2": partial(memory, sp=(2, 2)), "halo": halo}
        found = ways[part](name, side)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
