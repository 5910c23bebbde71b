"""What Python takes of serving on a GPU: `python benchmarks/serve_host.py [--json FILE] [--peer FOLDER] [PART ...]`.

The GPU computes while the next step is prepared, so it never waits as long as Python is faster. Here the engine does
all that it does on a GPU, with CUDA graphs and one step ahead; what the kernels would compute is left out, and tokens
are numbers that are there when the step's time is over. A byte-level BPE tokenizer writes the text. The parts:

- engine: `Engine.generate`, 1 to 256 answers at once, with a GPU that needs no time; of a step the CPU time of the
  engine's thread, and the longest step of all, which tells whether something stops everybody now and then
- paced: 256 answers with steps that take the GPU so many milliseconds: for what share of the time it computes, for
  `Engine.generate` and over HTTP, streamed to clients of another process; there also the CPU time of the server's
  process a token, and how long clients wait for the next
- promised: steps take as long as those of a Llama of 8B took on an H200; requests arrive at random, from as many as can
  be answered to too many, and are promised a first token within 5 s and 25 ms between others. Readers are in the same
  process. (`h200/serve.py rate` is the same with the GPU.)
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from sysconfig import get_paths
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from rate import at_rate  # beside this file: a peer's checkout need not have it
from rich.console import Console
from rich.progress import track
from torch import Tensor

from echelon.bench.serve import drive
from echelon.bench.serve_client import Client
from echelon.bench.serve_load import RandomLoad, random_requests
from echelon.bench.serve_target import Server
from echelon.models.llama import Llama, LlamaConfig
from echelon.models.tokenizer import FromFile
from echelon.serve import fused, runner, sample, way
from echelon.serve.engine import Engine
from echelon.serve.request import SamplingParams
from echelon.serve.server import listen, serve
from echelon.serve.settings import Settings
from echelon.serve.slo import Slo
from echelon.serve.text import Text

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, CONTEXT, MOST = 8000, 2048, 256
DRAWING = importlib.import_module("echelon.serve." + ("drawing" if hasattr(fused, "drawing") else "kernels"))  # earlier
WRITTEN, ROUNDS, TURNS = 600, 4, 3  # tokens of an answer
RATES = (64, 80, 85, 90, 100)  # requests a second


class Device:
    """In place of a GPU: steps take `seconds` each, one after the other, whatever they compute."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, 0.0
        self.steps = 0

    def launch(self, rows: int) -> Tensor:
        self._until = max(self._until, time.perf_counter()) + self._seconds
        self.steps += 1
        return torch.zeros(rows, 8)

    def to_host(self, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        return tensors, Event(self._until)


class Event(NamedTuple):
    when: float

    def synchronize(self) -> None:
        if (left := self.when - time.perf_counter()) > 0:
            time.sleep(left)


class Llama8B(Device):
    """Steps take as long as on an H200 (results/h200-serve.json, `narrow` and `mixed`): products by their rows, and
    reading keys and values at 4.31 TB/s. Steps of more rows, which are taken only while nobody answers, take no longer
    than the largest.
    """

    rows, ms = (1, 16, 64, 127, 256, 575, 1213), (4.76, 4.95, 5.36, 5.94, 7.6, 15.4, 31.0)  # the last: as before it

    def __init__(self) -> None:
        super().__init__(0.0)

    def prepare(self, parts: list[Any]) -> None:
        keys = sum(part.start + len(part.tokens) for part in parts)
        rows = sum(len(part.tokens) for part in parts)
        self._seconds = float(np.interp(rows, self.rows, self.ms)) / 1e3 + keys * 131_072 / 4.31e12


class Graph:
    """In place of a CUDA graph, and of what graphs share."""

    def __init__(self, *_: object) -> None:
        pass


@contextmanager
def engine(tokenizer: Path, device: Device, **settings: Any) -> Iterator[Engine]:
    shape = {"dim": 8, "layers": 1, "heads": 1, "kv_heads": 1, "mlp_dim": 8}
    model = Llama(LlamaConfig(vocabulary=VOCABULARY, context=CONTEXT, **shape)).requires_grad_(False)
    text = Text(FromFile(tokenizer))
    tokens = torch.tensor(text.encode(Path(random.__file__).read_text()))
    Graph.replay = lambda self: device.launch(2 * CONTEXT)

    def forward(self: Any, first: Any, *_: Any) -> Tensor:
        return device.launch(getattr(first, "places_3T", first).shape[1])  # earlier checkouts gave the places alone

    with ExitStack() as left_out:
        for where, name, instead in (
            (way, "has_kernels", lambda _: True),
            (fused, "Graph", Graph),
            (fused, "Captures", Graph),
            (fused.Fused, "_forward", forward),
            (sample, "_to_host", device.to_host),
            (type(model.head), "forward", lambda self, hidden_RD: hidden_RD[:, :1].expand(-1, VOCABULARY)),
            (DRAWING, "limit", lambda *_: None),
            (DRAWING, "draw", lambda logits_RV, temperatures_R, keys_2R, places_R, *_: tokens[places_R % len(tokens)]),
        ):
            left_out.enter_context(patch.object(where, name, instead, create=name == "limit"))
        limits = Settings(cache_gib=0.1, context=CONTEXT, token_budget=8192, most_running=MOST, **settings)
        yield left_out.enter_context(Engine(model, text, limits))


def write_tokenizer(path: Path) -> None:
    """Trained on Python's own library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.train([str(each) for each in sorted(Path(get_paths()["stdlib"]).glob("*.py"))[:100]], trainer)
    made.save(str(path))


def in_process(tokenizer: Path) -> dict[str, Any]:
    found = {}
    chance = random.Random(0)
    params = SamplingParams(max_tokens=WRITTEN, temperature=0.6, ignore_eos=True)
    with engine(tokenizer, Device(0.0)) as serving:
        clock = time.pthread_getcpuclockid(serving._thread.ident or 0)
        landed: list[float] = []
        land = serving._land

        def timed(flight: Any) -> None:
            land(flight)
            landed.append(time.perf_counter())

        serving._land = timed  # type: ignore[method-assign]
        for count in (1, 16, 64, 256):
            steps: list[float] = []
            busy: list[float] = []
            for turn in range(ROUNDS + 1):
                prompts = [[chance.randrange(1, VOCABULARY) for _ in range(50)] for _ in range(count)]
                landed.clear()
                began = time.clock_gettime(clock)
                serving.generate(prompts, params)
                if turn:
                    steps += [after - before for before, after in pairwise(landed)]
                    busy.append((time.clock_gettime(clock) - began) / len(landed))
            thread = statistics.median(busy)
            found[f"{count} answers"] = {
                "step, ms": 1e3 * statistics.median(steps),
                "thread, ms": 1e3 * thread,
                "thread, µs a token": 1e6 * thread / count,
                "longest step, ms": 1e3 * max(steps),
            }
    return found


def paced(tokenizer: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for seconds in (0.007, 0.002):
        with engine(tokenizer, device := Device(seconds)) as serving:
            chance = random.Random(1)
            prompts = [[chance.randrange(1, VOCABULARY) for _ in range(50)] for _ in range(MOST)]
            before, began = device.steps, time.perf_counter()
            serving.generate(prompts, SamplingParams(max_tokens=WRITTEN, ignore_eos=True))
            took = time.perf_counter() - began
        found[f"steps of {1e3 * seconds:g} ms, generate"] = {"computes": (device.steps - before) * seconds / took}
        found[f"steps of {1e3 * seconds:g} ms, http"] = over_http(tokenizer, seconds)
    return found


def promised(tokenizer: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    device, launch = Llama8B(), runner.Runner.launch

    def prepared(self: Any, parts: list[Any], draws: Any) -> Any:
        device.prepare(parts)
        return launch(self, parts, draws)

    with patch.object(runner.Runner, "launch", prepared), engine(tokenizer, device, slo=Slo(5.0, 0.025)) as serving:
        asyncio.run(at_rate(serving, 20, 4, VOCABULARY))  # what a step costs is learned
        for rate in RATES:
            found[f"{rate} a second"] = asyncio.run(at_rate(serving, rate, 20, VOCABULARY))
    return found


PARTS = {"engine": in_process, "paced": paced, "promised": promised}


def over_http(tokenizer: Path, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", str(tokenizer), "--step", str(seconds)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    try:
        url = child.stdout.readline().split(" at ")[1].split()[0]
        return asyncio.run(streamed(url, child.pid, seconds))
    finally:
        child.terminate()
        child.wait()


async def streamed(url: str, process: int, seconds: float) -> dict[str, Any]:
    client = Client(url, {})
    model = await Server.find_model(client, "")
    target = Server(client, "openai", "", model, {"ignore_eos": True}, time.perf_counter)
    for turn in range(2):
        load = RandomLoad(input_tokens=50, output_tokens=WRITTEN)
        requests = random_requests(MOST, load, seed=turn, ids=range(1, VOCABULARY))
        began = cpu_seconds(process)
        outcomes, took = await drive(target, requests, [0.0] * MOST, None, time.perf_counter)
    tokens = sum(each.output_tokens for each in outcomes)
    gaps = [gap for each in outcomes for gap in each.gaps]
    await target.close()
    return {
        "computes": WRITTEN * seconds / took,
        "server, µs a token": 1e6 * (cpu_seconds(process) - began) / tokens,
        "tokens/s": tokens / took,
        "wait median, ms": 1e3 * statistics.median(gaps),
        "wait p99, ms": 1e3 * statistics.quantiles(gaps, n=100)[98],
        "longest, ms": 1e3 * max(gaps),
        "events a token": (len(gaps) + MOST) / tokens,
        "failed": sum(bool(each.error) for each in outcomes),
    }


def cpu_seconds(process: int) -> float:
    """That it has used so far."""
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def measured(checkout: Path, tokenizer: Path, part: str) -> dict[str, Any]:
    """The figures of an Echelon, in a process of its own."""
    command = [sys.executable, __file__, part, "--once", str(tokenizer)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="where to write the result; parts that are there already are kept")
    parser.add_argument("--peer", type=Path, help="another checkout of Echelon, which takes turns with this one")
    parser.add_argument("--once", type=Path, metavar="TOKENIZER", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, metavar="TOKENIZER", help=argparse.SUPPRESS)
    parser.add_argument("--step", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    if arguments.serve:
        with engine(arguments.serve, Device(arguments.step)) as serving:
            sys.exit(serve(serving, listen(port=0)))
    if arguments.once:
        print(json.dumps(PARTS[arguments.parts[0]](arguments.once)))
        return
    contenders = {"here": ROOT} | ({"peer": arguments.peer.resolve()} if arguments.peer else {})
    result: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        result = json.loads(arguments.json.read_text())
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(tokenizer := Path(folder) / "tokenizer.json")
        turns = [(part, name) for part in arguments.parts for _ in range(TURNS) for name in contenders]
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {turn: [] for turn in turns}
        for part, name in track(turns, "turns", console=Console(stderr=True)):
            runs[part, name].append(measured(contenders[name], tokenizer, part))
    for part in arguments.parts:
        result[part] = {name: middle(runs[part, name]) for name in contenders}
        for name, rows in result[part].items():
            for row, figures in rows.items():
                told = ", ".join(f"{what} {value:.3g}" for what, value in figures.items())
                print(f"{part}, {name}, {row}: {told}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def middle(runs: list[Any]) -> Any:
    """The median of each figure."""
    if isinstance(runs[0], dict):
        return {name: middle([run[name] for run in runs]) for name in runs[0]}
    return statistics.median(runs)


if __name__ == "__main__":
    main()
