"""What serving costs beside the model: `python benchmarks/serve_costs.py`, on a small Llama in fp32.

- reproducible: 32 requests at once, tokens a second, against the fast mode; they take turns
- the engine's own part of a step (scheduling, sampling, text, queues), with 1, 8 and 32 requests that answer
- promises of latency: Poisson arrivals at more than can be answered, with and without `--slo`: what was answered in
  time, and what was refused
- the control path over two ranks: from the first rank's call to tell what a step computes, to when the other knows it;
  half of the way there and back, since their clocks are not the same
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.bench.serve_load import arrivals
from echelon.launch.identity import identity
from echelon.models import presets
from echelon.models.llama import LlamaConfig
from echelon.serve.engine import Engine
from echelon.serve.request import Refused, SamplingParams
from echelon.serve.runner import Runner
from echelon.serve.sample import Chosen, Draws
from echelon.serve.settings import Settings
from echelon.serve.slo import Slo
from echelon.serve.step import Part, Shape, pack

CONFIG = LlamaConfig(vocabulary=256, context=256, dim=384, layers=6, heads=6, kv_heads=3, mlp_dim=1024)
REQUESTS, REPETITIONS, ROUNDS = 32, 5, 300
LOADED, ARRIVALS = 300, 40.0  # requests, and how many a second
OUT = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)


def prompts(count: int, length: int) -> list[list[int]]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (length,), generator=chance).tolist() for _ in range(count)]


def model() -> Any:
    return presets.build(CONFIG).requires_grad_(False)


def reproducible() -> dict[str, Any]:
    """Tokens a second of each mode, and their ratio, turn by turn."""
    engines = {
        kind: Engine(model(), settings=Settings(cache_gib=0.25, reproducible=kind == "reproducible"))
        for kind in ("fast", "reproducible")
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in engines}
    for turn in range(REPETITIONS + 1):
        for kind, engine in engines.items():
            began = time.perf_counter()
            engine.generate(prompts(REQUESTS, 64 + turn), OUT)  # others each time: nothing is found in the cache
            if turn:
                speeds[kind].append(REQUESTS * 32 / (time.perf_counter() - began))
    for engine in engines.values():
        engine.close()
    ratios = [slow / fast for slow, fast in zip(speeds["reproducible"], speeds["fast"], strict=True)]
    medians = {kind: statistics.median(each) for kind, each in speeds.items()}
    return {"tokens/s": medians, "share of the fast mode": statistics.median(ratios), "from and to": spread(ratios)}


def own_part() -> dict[str, Any]:
    """Milliseconds of a step in which everyone answers, and those of them that are not the runner's."""
    found = {}
    engine = Engine(model(), settings=Settings(cache_gib=0.25))
    runs: list[float] = []
    launch = engine._runner.launch

    def timed(parts: list[Part], draws: Draws) -> Chosen | None:
        began = time.perf_counter()
        chosen = launch(parts, draws)
        runs.append(time.perf_counter() - began)
        return chosen

    engine._runner.launch = timed  # type: ignore[method-assign]
    for count in (1, 8, 32):
        runs.clear()
        began = time.perf_counter()
        engine.generate(prompts(count, 8), SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
        whole = time.perf_counter() - began
        steps = len(runs)
        found[str(count)] = {"step ms": 1e3 * whole / steps, "own ms": 1e3 * (whole - sum(runs)) / steps}
    engine.close()
    return found


def promises() -> dict[str, Any]:
    """The 99th percentiles in ms, what was refused, and tokens a second, under the same arrivals."""
    slo = Slo(ttft=2.0, tbt=0.08)
    found: dict[str, Any] = {"promised": {"ttft ms": 2e3, "tbt ms": 80.0}}
    for kind, promised in (("without", None), ("with", slo)):
        engine = Engine(model(), settings=Settings(cache_gib=0.25, slo=promised))
        engine.generate(prompts(8, 40), OUT)  # what is learned before the doors open
        found[kind] = asyncio.run(under_load(engine))
        engine.close()
    return found


async def under_load(engine: Engine) -> dict[str, Any]:
    ttft: list[float] = []
    tbt: list[float] = []
    refused = tokens = 0

    async def ask(prompt: list[int], when: float) -> None:
        nonlocal refused, tokens
        await asyncio.sleep(when)
        last, times = time.perf_counter(), ttft
        try:
            async for piece in engine.stream(prompt, OUT):
                tokens += len(piece.tokens)
                now = time.perf_counter()
                times.append(now - last)
                last, times = now, tbt
        except Refused:
            refused += 1

    began = time.perf_counter()
    whens = arrivals(LOADED, ARRIVALS, 1.0, 0)
    await asyncio.gather(*(ask(*each) for each in zip(prompts(LOADED, 100), whens, strict=True)))
    seconds = time.perf_counter() - began
    worst = {"ttft p99 ms": 1e3 * percentile(ttft), "tbt p99 ms": 1e3 * percentile(tbt)}
    return worst | {"refused": refused, "of": LOADED, "tokens/s": tokens / seconds}


def percentile(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def control_path() -> dict[str, Any]:
    """On two ranks."""
    dist.init_process_group("echelon")
    group = dist.group.WORLD
    assert group is not None
    runner = Runner(model(), Shape(pages=64, page_size=16, rows=32, row_pages=64), Settings(), group=group)
    found = {}
    for count in (1, 32):
        told = pack([Part(row, 112, [7], 7, [7], True) for row in range(count)])  # each begins a page
        back = torch.zeros(1)
        times = []
        for _ in range(ROUNDS):
            dist.barrier()
            began = time.perf_counter()
            if group.rank() == 0:
                runner._tell(told)
                dist.recv(back, 1)
            else:
                runner._hear()
                dist.send(back, 0)
            times.append(time.perf_counter() - began)
        found[f"{count} requests, µs"] = {"median": 5e5 * statistics.median(times), "from and to": spread(times, 5e5)}
    return found


def spread(values: list[float], factor: float = 1.0) -> list[float]:
    """Between which a half of them lies."""
    low, _, high = statistics.quantiles(values, n=4)
    return [factor * low, factor * high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    if identity().size == 2:
        found = control_path()
        if dist.get_rank() == 0:
            print(json.dumps(found))
        return
    result: dict[str, Any] = {"what": (__doc__ or "").splitlines()[0], "torch": torch.__version__}
    result |= {"threads": torch.get_num_threads(), "reproducible": reproducible(), "own part of a step": own_part()}
    result["promises"] = promises()
    command = [sys.executable, "-m", "echelon.cli", "run", "-n", "2", __file__]
    ranks = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    result["control path"] = json.loads(ranks.stdout.splitlines()[-1])
    for part in ("reproducible", "own part of a step", "promises", "control path"):
        print(part)
        for name, value in result[part].items():
            print(f"  {name}: {json.dumps(value, ensure_ascii=False)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
