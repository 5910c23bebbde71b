"""Serving on one GPU: `python3 benchmarks/h200/serve.py [--json FILE] [PART ...]`, from the repository's root.

Random weights in bf16; each part can be asked for alone:

- throughput: Qwen3-0.6B's shape, 256 sequences at once, 100 to 1024 tokens in and out, drawn at temperature 0.6
- transformers: a Llama of 1.1B and 256 requests with prompts of 32 to 512 tokens, 144 out each, beside transformers'
  own continuous batching of the same
- step: a step that writes a token for each of 1 and of 64 sequences, of a Llama of 8B, beside the time in which the GPU
  reads the bytes that such a step must read: weights, and keys and values
- where: the time of a step of the first part's model with 256 sequences, by kind of kernel
- parts: the first part again, with one of the engine's choices turned off at a time
- pieces: a step of one sequence of 1,024 and of 16,384 tokens, and of the longer one beside 63 of the shorter ones, of
  the Llama of 8B, with keys read in as many pieces as the engine chooses, and in one
- mixed: a step of the same model that writes a token for each of 63 sequences of 1,024 tokens and reads 64 or 512 of
  another's prompt; and one that reads 60 prompts of 8 tokens beside 4 such sequences; as one CUDA graph and launched
  kernel by kernel
- rows: what the products of one layer of it take, by the number of rows
- draws: drawing for 1 and for 256 rows of 151,936 logits, in the usual way, with top-p and top-k (beside the same with
  logits that are sorted for it), and with penalties
- narrow: weights in 8 bits, int8 and fp8, beside bf16: steps of a Llama of 8B, the first part's speed, and the
  perplexity on held-out text of a small byte-level Llama that has learned Python's standard library
- rate: requests of 51 to 461 tokens in and 28 to 260 out for the Llama of 8B, arriving at random: the highest rate at
  which none is refused, 99 of 100 first tokens come within 5 s, and 99 of 100 others within 25 ms of the one before
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks import quantize as quantize_benchmark  # noqa: E402
from benchmarks.h200.serve_report import show  # noqa: E402
from benchmarks.rate import at_rate  # noqa: E402
from echelon.models.llama import Llama, LlamaConfig  # noqa: E402
from echelon.models.presets import build  # noqa: E402
from echelon.parallel import shards  # noqa: E402
from echelon.serve import drawing, memory, way  # noqa: E402
from echelon.serve.engine import Engine  # noqa: E402
from echelon.serve.fused import mlp_of  # noqa: E402
from echelon.serve.load import load  # noqa: E402
from echelon.serve.pieces import Pieces  # noqa: E402
from echelon.serve.quantize import quantize, weight_bytes  # noqa: E402
from echelon.serve.request import SamplingParams  # noqa: E402
from echelon.serve.rows import layer_seconds  # noqa: E402
from echelon.serve.sample import Draw, Draws, likely, sample  # noqa: E402
from echelon.serve.settings import Settings  # noqa: E402
from echelon.serve.slo import Slo  # noqa: E402
from echelon.serve.step import PENDING, Part, Shape  # noqa: E402

LLAMA_1B = LlamaConfig(vocabulary=32000, context=2048, dim=2048, layers=22, heads=32, kv_heads=4, mlp_dim=5632)
PUBLISHED = {"mini-sglang": 20_711, "nano-vllm": 19_638}  # tokens a second, on one H200
CUDA = torch.device("cuda")
KINDS = {  # of kernels
    "_attend": "attention",
    "_merge": "pieces put together",
    "_enter": "into the cache",
    "_norm": "norms",
    "_gated": "SwiGLU",
    "_draw": "drawing",
    "_best": "drawing",
}


def throughput(quantized: str = "", **turned_off: bool) -> dict[str, Any]:
    chance = random.Random(0)
    lengths = [(chance.randint(100, 1024), chance.randint(100, 1024)) for _ in range(256)]
    prompts = [[chance.randrange(10_000) for _ in range(read)] for read, _ in lengths]
    params = [SamplingParams(max_tokens=write, temperature=0.6, ignore_eos=True) for _, write in lengths]
    loaded = load("qwen3-0.6b", random=True, device="cuda")
    if quantized:
        quantize(loaded.model, quantized)
    must = bytes_of_answers(loaded.model, lengths)
    began = time.perf_counter()
    settings = Settings(context=2048, token_budget=16384, most_running=256, **turned_off)
    engine = Engine(loaded.model, loaded.text, settings)
    ready = time.perf_counter() - began
    engine.generate([[number] * 300 for number in range(8)], SamplingParams(max_tokens=16, ignore_eos=True))
    began = time.perf_counter()
    engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    engine.close()
    written = sum(write for _, write in lengths)
    return {
        "tokens/s": written / seconds,
        "seconds": seconds,
        "tokens out": written,
        "TB that must be read": must / 1e12,
        "ready after, s": ready,
        "published": PUBLISHED,
    }


def parts() -> dict[str, Any]:
    found = {}
    for name in ("ahead", "graphs", "fused"):
        found[f"without {name}, tokens/s"] = throughput(**{name: False})["tokens/s"]
        free()
    return found


def rate() -> dict[str, Any]:
    loaded = load("llama3-8b", random=True, device="cuda")
    engine = Engine(loaded.model, loaded.text, Settings(context=2048, slo=Slo(ttft=5.0, tbt=0.025)))
    found: dict[float, Any] = {}
    try:
        asyncio.run(at_rate(engine, 20.0, 4, 30_000))  # what a step costs is learned
        held, lost = 0.0, math.inf
        asked = 64.0
        while lost - held > 4.0:
            figures = asyncio.run(at_rate(engine, asked, 20, 30_000))
            found[asked] = figures
            holds = figures["ttft p99, s"] < 5 and figures["tbt p99, ms"] < 25 and not figures["refused"]
            held, lost = (asked, lost) if holds else (held, asked)
            asked = round(1.25 * held if math.isinf(lost) else (held + lost) / 2, 1)
    finally:
        engine.close()
    return {"highest that holds, requests/s": held} | {f"{each:g} requests/s": found[each] for each in sorted(found)}


def beside_transformers() -> dict[str, Any]:
    chance = random.Random(0)
    prompts = [[chance.randrange(32000) for _ in range(chance.randint(32, 512))] for _ in range(256)]
    written = 144 * len(prompts)
    with torch.device("meta"):
        model = Llama(LLAMA_1B)
    ours = shards.load(model, None, lambda each: each.initialize(), device=CUDA, dtype=torch.bfloat16)
    engine = Engine(ours, settings=Settings(context=1024, token_budget=16384))
    greedy = SamplingParams(max_tokens=144, temperature=0, ignore_eos=True)
    engine.generate([[number] * 300 for number in range(8)], SamplingParams(max_tokens=16, ignore_eos=True))
    began = time.perf_counter()
    engine.generate(prompts, greedy)
    mine = written / (time.perf_counter() - began)
    engine.close()
    del engine, ours, model
    free()
    theirs = transformers_speed(prompts)
    return {"tokens/s": mine, "transformers, tokens/s": theirs, "times": mine / theirs}


def transformers_speed(prompts: list[list[int]]) -> float:
    from transformers import GenerationConfig, LlamaForCausalLM
    from transformers import LlamaConfig as TheirConfig
    from transformers.generation import ContinuousBatchingConfig

    ours = LLAMA_1B
    config = TheirConfig(
        vocab_size=ours.vocabulary,
        hidden_size=ours.dim,
        intermediate_size=ours.mlp_dim,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.heads,
        num_key_value_heads=ours.kv_heads,
        max_position_embeddings=ours.context,
        attn_implementation="paged|sdpa",
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(CUDA):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1), ContinuousBatchingConfig()
    )
    manager.start()
    seconds = 0.0
    for rounds, count, tokens in ((0, 4, 8), (1, len(prompts), 144)):
        began = time.perf_counter()
        for number, prompt in enumerate(prompts[:count]):
            manager.add_request(list(prompt), f"{rounds}/{number}", tokens, eos_token_id=-1)
        done = 0
        while done < count:
            result = manager.get_result(timeout=120)
            assert result is not None, "transformers has not answered in time"
            done += result.is_finished()
        seconds = time.perf_counter() - began
    manager.stop(block=True)
    return 144 * len(prompts) / seconds


def narrow() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("", "fp8", "int8"):
        figures = steps(kind, (1, 16, 64, 256))
        free()
        figures["throughput, tokens/s"] = throughput(kind)["tokens/s"]
        free()
        found[kind or "bf16"] = figures
    shape = {"vocabulary": 256, "context": 128, "dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "mlp_dim": 1408}
    contenders = {kind or "bf16": ("bf16", kind) for kind in ("", "fp8", "int8")}
    with tempfile.TemporaryDirectory() as folder:
        read = quantize_benchmark.read(
            quantize_benchmark.trained(Path(folder), 1000, shape, "cuda"), {"fp32": ("fp32", ""), **contenders}, "cuda"
        )
    for kind, figures in read.items():
        found.setdefault(kind, {})["perplexity"] = figures["perplexity"]
    return found


def steps(quantized: str = "", batches: tuple[int, ...] = (1, 64)) -> dict[str, Any]:
    loaded = load("llama3-8b", random=True, device="cuda")
    if quantized:
        quantize(loaded.model, quantized)
    speed = reading_speed()
    found: dict[str, Any] = {"reading, TB/s": speed / 1e12}
    for batch in batches:
        settings = Settings(context=2048, token_budget=2048, most_running=batch)
        seconds = step_time(loaded.model, settings, [1024] * batch)
        must = bytes_of_step(loaded.model, batch, 1024) / speed
        found[f"batch {batch}"] = {"ms": seconds * 1e3, "reading alone, ms": must * 1e3, "of it": must / seconds}
    return found


def pieces() -> dict[str, Any]:
    with torch.device("meta"):
        empty = build("llama3-8b", context=32_768)
    model = shards.load(empty, None, lambda each: each.initialize(), device=CUDA, dtype=torch.bfloat16)
    found = {}
    for name, lengths in {
        "1024 tokens": [1024],
        "16384 tokens": [16_384],
        "63 × 1024 + 16384": [1024] * 63 + [16_384],
    }.items():
        settings = Settings(context=max(lengths) + 64, token_budget=2048, most_running=len(lengths))
        cut = step_time(model, settings, lengths)
        with patch.object(Pieces, "_more", lambda *_: 1):
            whole = step_time(model, settings, lengths)
        found[name] = {"in pieces, ms": 1e3 * cut, "whole, ms": 1e3 * whole, "times": whole / cut}
    return found


def mixed() -> dict[str, Any]:
    loaded = load("llama3-8b", random=True, device="cuda")
    settings = Settings(context=2048, token_budget=2048, most_running=64)
    found = {}
    for answers, prompts in ((63, [64]), (63, [512]), (4, [8] * 60)):
        graph = step_time(loaded.model, settings, [1024] * answers, prompts)
        kernels = step_time(loaded.model, replace(settings, graphs=False), [1024] * answers, prompts)
        figures = {"one graph, ms": 1e3 * graph, "kernel by kernel, ms": 1e3 * kernels, "times": kernels / graph}
        found[f"{sum(prompts)} tokens of {len(prompts)} read"] = figures
    return found


def rows() -> dict[str, Any]:
    model = load("llama3-8b", random=True, device="cuda").model
    way.prepare(model)
    seconds = layer_seconds(model.blocks[0].attention, mlp_of(model.blocks[0].mlp))
    return {"ms": {f"{count} rows": 1e3 * seconds(count) for count in range(16, 1_153, 16)}}


def draws() -> dict[str, Any]:
    chance, found = random.Random(0), dict[str, Any]()
    logits = 4 * torch.randn(256, 151_936, device=CUDA, dtype=torch.bfloat16)
    sorting: Any = SimpleNamespace(
        limit=lambda logits_RV, *by: likely(logits_RV, *by, has_limit=True),
        draw=lambda logits_RV, temperature_R, keys_2R, places_R, limited_RV: drawing.draw(
            limited_RV, temperature_R, keys_2R, places_R
        ),
    )
    kinds = {
        "usual": ({}, drawing),
        "top-p 0.95": ({"top_p": 0.95}, drawing),
        "top-p 0.95, top-k 20": ({"top_p": 0.95, "top_k": 20}, drawing),
        "top-p 0.95, top-k 20, sorted": ({"top_p": 0.95, "top_k": 20}, sorting),
        "penalties": ({"presence_penalty": 1.0}, drawing),
    }
    for rows in (1, 256):
        for name, (changes, kernels) in kinds.items():
            params = SamplingParams(temperature=0.6, **changes)
            each = Draws(
                Draw(params, (row, row), [chance.randrange(100_000) for _ in range(800)], 400) for row in range(rows)
            )
            columns = torch.from_numpy(each.columns()).to(CUDA)
            seconds = timed(partial(sample, logits[:rows], each, columns, kernels))
            found.setdefault(f"{rows} rows", {})[f"{name}, ms"] = 1e3 * seconds
    return found


def where() -> dict[str, Any]:
    loaded = load("qwen3-0.6b", random=True, device="cuda")
    settings = Settings(context=2048, token_budget=2048, most_running=256)
    launch = launcher(loaded.model, settings, [800] * 256)
    seconds = timed(launch)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            launch()
        torch.cuda.synchronize()
    kinds: defaultdict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        kinds[kind_of(event.key)] += event.device_time_total / 10 / 1e6
    kinds["between kernels"] = seconds - sum(kinds.values())
    speed = reading_speed()
    return {
        "step, ms": seconds * 1e3,
        "reading alone, ms": bytes_of_step(loaded.model, 256, 800) / speed * 1e3,
        "reading weights alone, ms": bytes_of_step(loaded.model, 0, 0) / speed * 1e3,
        "ms": {kind: 1e3 * of for kind, of in sorted(kinds.items(), key=lambda each: -each[1])},
    }


def kind_of(kernel: str) -> str:
    is_product = any(word in kernel.lower() for word in ("gemm", "nvjet", "cutlass", "splitk", "gemv"))
    return "products" if is_product else next((kind for name, kind in KINDS.items() if name in kernel), "the rest")


def step_time(model: Any, settings: Settings, lengths: list[int], prompts: Sequence[int] = ()) -> float:
    """Seconds of a step (see `launcher`); nothing of it is left on the GPU."""
    seconds = timed(launcher(model, settings, lengths, prompts))
    free()
    return seconds


def launcher(model: Any, settings: Settings, lengths: list[int], prompts: Sequence[int] = ()) -> Callable[[], Any]:
    """What launches a step of answers that have so many tokens each, and of the first tokens of prompts: so many."""
    settings = settings.on(next(model.parameters()).device)
    pages = [-(-length // settings.page_size) + 1 for length in (*lengths, *prompts)]
    ends = list(accumulate(pages))
    orders = [list(range(end - count, end)) for end, count in zip(ends, pages, strict=True)]
    computed = way.build(model, Shape(ends[-1], settings.page_size, len(pages), max(pages)), settings)
    draws = Draws(
        Draw(SamplingParams(temperature=0.6), (row, row), [0] * length, 1) for row, length in enumerate(lengths)
    )
    chance = random.Random(0)
    read = [chance.choices(range(model.config.vocabulary), k=length) for length in prompts]

    def parts(token: int, of_row: list[list[int]]) -> list[Part]:
        answers = [Part(row, length, [token], 0, of_row[row], True) for row, length in enumerate(lengths)]
        of_prompts = enumerate(read, len(lengths))
        return answers + [Part(row, 0, tokens, 0, of_row[row], False) for row, tokens in of_prompts]

    again = parts(PENDING, [[] for _ in pages])

    @torch.inference_mode()
    def launch(parts: list[Part] = again) -> Any:
        return computed.launch(parts, draws)

    launch(parts(0, orders))
    return launch


def timed(launch: Callable[[], Any], steps: int = 50, rounds: int = 5) -> float:
    """Seconds of a step: the median of rounds."""
    times = []
    for _ in range(rounds):
        launch().result()
        began = time.perf_counter()
        for _ in range(steps):
            last = launch()
        last.result()
        times.append((time.perf_counter() - began) / steps)
    return statistics.median(times)


def bytes_of_step(model: Any, batch: int, length: int) -> float:
    """That it must read: all weights but the table of tokens, unless that is the head as well; keys and values."""
    weights = weight_bytes(model)
    weights -= 0 if model.tied else model.tokens.weight.nbytes
    return weights + batch * (length + 1) * memory.page_bytes(model, 1)


def bytes_of_answers(model: Any, lengths: list[tuple[int, int]]) -> float:
    """The same of all steps of answers that begin together. The first token of each comes with its prompt."""
    steps = max(write for _, write in lengths) - 1
    keys = sum(read + more for read, write in lengths for more in range(1, write))
    return steps * bytes_of_step(model, 0, 0) + keys * memory.page_bytes(model, 1)


def reading_speed() -> float:
    """Bytes a second, as fast as PyTorch reads 8 GiB."""
    x = torch.zeros(2**31, dtype=torch.float32, device=CUDA)
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        x.sum()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return x.nbytes / min(times)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "throughput": throughput,
    "transformers": beside_transformers,
    "step": steps,
    "where": where,
    "parts": parts,
    "pieces": pieces,
    "mixed": mixed,
    "rows": rows,
    "draws": draws,
    "narrow": narrow,
    "rate": rate,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="where to write the result; parts that are there already are kept")
    parser.add_argument("--code", default="", help="what the result shall call the code that was run: a commit")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU")
    result: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        result = json.loads(arguments.json.read_text())
    result |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in arguments.parts:
        figures = PARTS[name]()
        result[name] = {"code": arguments.code} | figures
        free()
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        show(name, figures)


if __name__ == "__main__":
    main()
