"""Temporal fusion beside what came before it, on a small Llama: `python benchmarks/serve_fusion.py`.

Requests arrive at random (Poisson), at rates that are multiples of what can be answered one at a time, and have
prompts and answers of different lengths. All contenders have the same weights (fp32, random), the same requests and
arrivals; they take turns. Each computes with one thread, since two gained nothing for a model this small; so only the
two instances have both cores.

- temporal fusion: Echelon's engine; a request enters at the next step
- one at a time: the same engine, with one request in it
- dynamic batching: what waits when a batch ends is the next batch, in the same engine; all in it are filled up to its
  longest prompt and answer, and answered when it ends
- two instances: two processes on a core each, with one request in each
- transformers: its own continuous batching
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch

from echelon.bench.serve import drive
from echelon.bench.serve_load import RandomLoad, Request, arrivals, random_requests
from echelon.bench.serve_target import Chunk, InProcess, Target, Usage
from echelon.models import hub
from echelon.serve.engine import Engine
from echelon.serve.load import load
from echelon.serve.request import SamplingParams
from echelon.serve.settings import Settings

MODEL = "llama-tiny"
LOAD = RandomLoad(input_tokens=24, output_tokens=24, spread=0.75)
REQUESTS, REPETITIONS, FACTORS = 32, 3, (0.5, 2.0, 8.0)
GREEDY = {"temperature": 0.0, "ignore_eos": True}
FUSION, ALONE = "temporal fusion", "one at a time"
PUBLISHED = {"GPT": 11, "LLaMA": 16, "over": "FasterTransformer's dynamic batching and concurrent instances, on GPUs"}

Answer = AsyncGenerator[Chunk | Usage, None]
clock = time.perf_counter


def model() -> Any:
    """Always the same values."""
    return load(MODEL, random=True, device="cpu").model


def in_engine(running: int) -> InProcess:
    settings = Settings(most_running=running, cache_gib=0.25, most_waiting=REQUESTS)
    return InProcess(Engine(model(), settings=settings), GREEDY, clock)


class DynamicBatching:
    model = "dynamic batching"

    def __init__(self) -> None:
        self._engine = in_engine(REQUESTS)
        self._waiting: list[tuple[Request, asyncio.Future[float]]] = []
        self._batches: asyncio.Task[None] | None = None

    async def send(self, request: Request) -> Answer:
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answered))
        if self._batches is None or self._batches.done():
            self._batches = asyncio.create_task(self._answer())
        yield Chunk(await answered, "")
        yield Usage(request.prompt_tokens, request.output_tokens)

    async def _answer(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            prompt = max(request.prompt_tokens for request, _ in batch)
            answer = max(request.output_tokens for request, _ in batch)
            rows = [Request((*request.prompt, *[0] * (prompt - len(request.prompt))), answer) for request, _ in batch]
            await asyncio.gather(*(self._whole(row) for row in rows))
            for _, answered in batch:
                answered.set_result(clock())

    async def _whole(self, request: Request) -> None:
        async for _ in self._engine.send(request):
            pass

    async def close(self) -> None:
        await self._engine.close()


class Instances:
    """Processes with a model each; who is free takes the next request."""

    model = "two instances"

    def __init__(self, count: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self._asked, self._told = context.Queue(), context.Queue()
        processes = [
            context.Process(target=_instance, args=(self._asked, self._told), daemon=True) for _ in range(count)
        ]
        for process in processes:
            process.start()
        for _ in processes:
            self._told.get()
        self._processes = processes
        self._asking: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[bool]]] = {}
        self._next = 0
        threading.Thread(target=self._hear, daemon=True).start()

    async def send(self, request: Request) -> Answer:
        pieces = asyncio.Queue[tuple[int, bool]]()
        number, self._next = self._next, self._next + 1
        self._asking[number] = asyncio.get_running_loop(), pieces
        self._asked.put((number, request.prompt, request.output_tokens))
        tokens, ends = 0, False
        while not ends:
            count, ends = await pieces.get()
            tokens += count
            yield Chunk(clock(), "")
        yield Usage(request.prompt_tokens, tokens)

    def _hear(self) -> None:
        while (told := self._told.get()) is not None:
            number, count, ends = told
            loop, pieces = self._asking[number]
            loop.call_soon_threadsafe(pieces.put_nowait, (count, ends))

    async def close(self) -> None:
        for _ in self._processes:
            self._asked.put(None)
        for process in self._processes:
            process.join()
        self._told.put(None)


def _instance(asked: Any, told: Any) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    engine = Engine(model(), settings=Settings(most_running=1, cache_gib=0.25))
    told.put(None)
    while (item := asked.get()) is not None:
        number, prompt, count = item
        for piece in engine.open(prompt, SamplingParams(max_tokens=count, **GREEDY)):
            told.put((number, len(piece.tokens), piece.finish is not None))
    engine.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Transformers:
    model = "transformers"

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        with tempfile.TemporaryDirectory() as folder:
            hub.save(model(), folder)
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._manager = theirs.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1), ContinuousBatchingConfig(max_memory_percent=0.05)
        )
        self._manager.start()
        self._next = 0

    async def send(self, request: Request) -> Answer:
        name, self._next = str(self._next), self._next + 1
        results = asyncio.Queue[Any]()
        self._manager.register_result_handler(name, results.put_nowait)
        self._manager.add_request(list(request.prompt), name, request.output_tokens, streaming=True, eos_token_id=-1)
        while True:
            result = await results.get()
            if result.error:
                raise RuntimeError(result.error)
            yield Chunk(clock(), "")
            if result.is_finished():
                yield Usage(request.prompt_tokens, len(result.generated_tokens))
                return

    async def close(self) -> None:
        self._manager.stop(block=True)


def measured(target: Target, requests: list[Request], times: list[float]) -> dict[str, float]:
    outcomes, _ = asyncio.run(drive(target, requests, times, None, clock))
    for request, outcome in zip(requests, outcomes, strict=True):
        if outcome.error or outcome.output_tokens != request.output_tokens:
            raise RuntimeError(f"{target.model}: {outcome.error or 'an answer has not the length that was asked for'}")
    seconds = max(outcome.end for outcome in outcomes) - min(outcome.start for outcome in outcomes)
    return {
        "tokens/s": sum(outcome.output_tokens for outcome in outcomes) / seconds,
        "latency": statistics.fmean(outcome.latency for outcome in outcomes),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of each contender, and how many times better fusion is, in the same repetition each."""
    table = {}
    for name, mine in runs.items():
        pairs = list(zip(runs[FUSION], mine, strict=True))
        table[name] = {figure: spread([run[figure] for run in mine]) for figure in ("tokens/s", "latency")}
        table[name]["fusion's throughput, times"] = spread([a["tokens/s"] / b["tokens/s"] for a, b in pairs])
        table[name]["fusion's latency, times less"] = spread([b["latency"] / a["latency"] for a, b in pairs])
    return table


def show(rate: float, factor: float, table: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"\n{rate:.2f} requests/s, {factor:g} × what one at a time can answer")
    print(f"{'':18s}{'tokens/s':>24s}{'mean latency, s':>24s}{'throughput, fusion ×':>24s}{'latency, fusion ÷':>24s}")
    for name, row in table.items():
        cells = [f"{cell['median']:.2f} ({cell['least']:.2f}–{cell['most']:.2f})" for cell in row.values()]
        print(f"{name:18s}" + "".join(f"{cell:>24s}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    arguments = parser.parse_args()
    busy = os.getloadavg()[0]
    torch.set_num_threads(1)
    contenders: dict[str, Target] = {FUSION: in_engine(REQUESTS), ALONE: in_engine(1)}
    contenders |= {each.model: each for each in (DynamicBatching(), Instances(), Transformers())}
    for target in contenders.values():
        measured(target, random_requests(8, LOAD, seed=1000), [0.0] * 8)
    began = clock()
    measured(contenders[ALONE], random_requests(16, LOAD, seed=2000), [0.0] * 16)
    capacity = 16 / (clock() - began)
    result: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "model": MODEL,
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__},
        "threads": 1,
        "others on the machine, load average before": busy,
        "one at a time, requests/s": capacity,
        "published by Flover": PUBLISHED,
        "rates": [],
    }
    for factor in FACTORS:
        rate, runs = factor * capacity, {name: [] for name in contenders}
        for repetition in range(arguments.repetitions):
            requests = random_requests(REQUESTS, LOAD, seed=10 * repetition)
            times = arrivals(REQUESTS, rate, 1.0, seed=repetition)
            for name, target in contenders.items():
                runs[name].append(measured(target, requests, times))
        table = compared(runs)
        result["rates"].append({"requests/s": rate, "times capacity": factor, "contenders": table})
        show(rate, factor, table)
    print(f"\nFlover's own: {PUBLISHED['GPT']} × (GPT) and {PUBLISHED['LLaMA']} × (LLaMA) over {PUBLISHED['over']}")
    for target in contenders.values():
        asyncio.run(target.close())
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
