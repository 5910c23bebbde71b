"""What Triton's compiler makes of the kernels for a GPU that is not there. It runs by itself, `python -m
tests.serve.compiled resources|late GPU`: a process either interprets kernels, as the other tests do, or compiles them.

Kernels are called as always, by whole steps of serving or by themselves, and are compiled instead of launched. What
they would have computed is left as it was.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

from echelon.models.presets import build
from echelon.parallel import kernels as training
from echelon.serve import fp8, fused, int8, kernels, way
from echelon.serve.quantize import quantize
from echelon.serve.rehearsal import rehearse
from echelon.serve.request import SamplingParams
from echelon.serve.sample import Draw, Draws
from echelon.serve.settings import Settings
from echelon.serve.step import PENDING, Part, Shape
from tests.serve.models import Replayed


class Gpu(NamedTuple):
    capability: int
    processors: int
    shared_memory: int  # bytes that a program may have


GPUS = {"H200": Gpu(90, 132, 232_448), "A100": Gpu(80, 108, 166_912), "RTX 4090": Gpu(89, 128, 101_376)}
SERVED = ("gpt2", "llama3-8b", "qwen3-0.6b")
WIDTHS = ((6144, 4096), (4096, 14336), (28672, 4096), (4096, 1024), (1024, 3072))  # of Llama 3 8B and Qwen3 0.6B
_DRAWS = (
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(top_p=0.5, logprobs=2),
    SamplingParams(top_k=3, presence_penalty=0.5),
)


class Driver:
    """Of a GPU that kernels can be compiled for, and no more; each is another one, for which there are none yet."""

    numbers = count()

    def __init__(self, gpu: Gpu) -> None:
        self._number, self._target = next(self.numbers), GPUTarget("cuda", gpu.capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def on(gpu: Gpu) -> Iterator[dict[int, tuple[str, Any]]]:
    """As if that GPU were there; gives what is compiled, as it is: the name of each kernel, and the kernel."""
    found: dict[int, tuple[str, Any]] = {}

    def compiled(kernel: Any, grid: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            made = kernel.run(*arguments, grid=grid, warmup=True, **named)
            found.setdefault(id(made), (kernel.fn.__name__, made))
            for tensor in arguments:
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64:
                    tensor.zero_()  # tokens that are drawn must exist

        return call

    triton.runtime.driver.set_active(Driver(gpu))
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict(os.environ, {"TRITON_CACHE_DIR": cache}),
        patch.object(jit.KernelInterface, "__getitem__", compiled),
        patch.object(kernels, "processors", lambda device: gpu.processors),
        patch.object(kernels, "_shared_memory", lambda device: gpu.shared_memory),
        patch.object(way, "has_kernels", lambda device: True),
        patch.object(int8, "has_kernels", lambda x: True),
        patch.object(fp8, "has_kernels", lambda x: True),
        patch.object(fused, "Captures", object),
        patch.object(fused, "Graph", Replayed),
    ):
        kernels._counts.cache_clear()
        yield found


def resources(gpu: Gpu) -> list[dict[str, Any]]:
    """Of all kernels, for models of their real widths: registers, stack and shared memory."""
    told = []
    for dtype in (torch.bfloat16, torch.float32):
        with on(gpu) as found, torch.inference_mode():
            for name in SERVED:
                a_layer(name, dtype)
            if dtype == torch.bfloat16:
                in_8_bits(has_floats=gpu.capability >= 89)
                train(has_8_bits=gpu.capability >= 89)
            of_all = {"dtype": str(dtype), "most shared": gpu.shared_memory}
            told += [{"kernel": name, **used(made), **of_all} for name, made in found.values()]
    return told


def a_layer(name: str, dtype: torch.dtype) -> None:
    """Steps of a model of one layer, on the meta device: few answers, many, and a prompt."""
    with torch.device("meta"):
        model = build(name, layers=1).to(dtype)
    way.prepare(model)
    step = fused.Fused(model, Shape(4096, 16, 256, 64), 8192, [])
    for answers in (1, 64, 256):
        parts = [Part(row, 10, [0], 0, [row], True) for row in range(answers)]
        for params in (SamplingParams(), SamplingParams(top_p=0.5)):
            step.launch(parts, Draws([Draw(params, (0, 0), [0], 1)] * answers))
    step.launch([Part(0, 0, [0] * 300, 0, list(range(19)), False)], Draws())


def in_8_bits(has_floats: bool) -> None:
    for columns, inner in WIDTHS:
        weight, scales = meta(columns, inner, dtype=torch.int8), meta(columns, 1, dtype=torch.float32)
        kernels.widen(weight, scales, torch.bfloat16)
        for rows in (1, 32, 128):
            x = meta(rows, inner)
            kernels.thin(x, None, weight, scales, None, x.dtype)
            if has_floats and rows <= fp8.FEW:
                x8, of_rows = kernels.in_8_bits(x)
                kernels.thin(x8, of_rows, weight.view(x8.dtype), scales, None, x.dtype)


def train(has_8_bits: bool) -> None:
    logits, places, scale = meta(64, 50304), meta(64, dtype=torch.int32), meta(1, dtype=torch.float32)
    lse, _ = training.statistics(logits, places)
    training.wrong(logits, lse, places, logits)
    x = meta(4096, 3072)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) if has_8_bits else ():
        training.cast_gelu_backward(x, x, scale, dtype)
        training.cast(x, scale, dtype, gelu=True)
        x8 = training.cast(x, scale, dtype)
        training.sum_rows(x8)
        training.transpose(x8)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def used(made: Any) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": numbers["REG"], "stack": numbers["STACK"] + numbers["LOCAL"], "shared": made.metadata.shared}


def late(gpu: Gpu, name: str, quantized: str, graphs: bool, seed: int) -> list[str]:
    """The kernels that random steps need, and that were not compiled when the engine began. (Nothing is computed here,
    but memory is real, as are the places of all tensors, which kernels are compiled for, too.)
    """
    chance = random.Random(seed)
    most, budget, context = chance.choice([1, 3, 20, 100, 256]), chance.choice([64, 300, 2048]), 1024
    kv_heads = {} if name == "gpt2" else {"kv_heads": chance.choice([1, 2, 4, 8]), "mlp_dim": 256}
    model = build(name, layers=1, dim=128, heads=8, vocabulary=chance.choice([300, 1001]), context=context, **kv_heads)
    model = model.to(torch.bfloat16).eval()
    if quantized:
        quantize(model, quantized)
    shape = Shape(2048, 16, most, context // 16)
    with on(gpu) as found, torch.inference_mode(), patch.object(jit.JITFunction, "_do_compile", noted):
        way.prepare(model)
        computed = way.build(model, shape, Settings(graphs=graphs, most_running=most, token_budget=budget))
        rehearse(computed, shape, budget, context, True)
        before = set(found)
        for _ in range(40):
            parts = random_step(chance, most, budget, context)
            wanted = sum(part.is_last for part in parts)
            computed.launch(parts, Draws([Draw(chance.choice(_DRAWS), (0, 0), [0], 1) for _ in range(wanted)]))
        return sorted({f"{name}: {made}" for key, (name, made) in found.items() if key not in before})


def noted(kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, *_: Any) -> Any:
    """In place of a compiled kernel: what it would have been compiled for."""
    made = {kernel.arg_names[place[0]]: value for place, value in constants.items()}
    kernel.device_caches[device][0][key] = made
    return made


def random_step(chance: random.Random, most: int, budget: int, context: int) -> list[Part]:
    rows = chance.sample(range(most), most)
    answers = min(chance.choice([0, 1, chance.randint(0, most)]), budget)
    parts = [
        Part(rows.pop(), chance.randrange(context), [chance.choice([0, PENDING])], 0, [0], True) for _ in range(answers)
    ]
    left = budget - answers
    for _ in range(chance.randint(0, 5)):
        if left < 2 or not rows:
            break
        count = chance.randint(2, min(left, context))
        left -= count
        new = list(range(chance.randint(0, 3)))
        parts.append(Part(rows.pop(), chance.randint(0, context - count), [0] * count, 0, new, chance.random() < 0.5))
    return parts or [Part(0, 0, [0], 0, [0], True)]


def late_anywhere(gpu: Gpu) -> dict[str, list[str]]:
    """By engine: several models, limits and settings."""
    kinds = [("gpt2", ""), ("llama3-8b", "int8"), ("llama3-8b", "fp8"), ("qwen3-0.6b", "")]
    return {
        f"{name} {quantized} {graphs=} {seed=}": late(gpu, name, quantized, graphs, seed)
        for seed in range(4)
        for name, quantized in kinds
        for graphs in (True, False)
    }


if __name__ == "__main__":
    print(json.dumps({"resources": resources, "late": late_anywhere}[sys.argv[1]](GPUS[sys.argv[2]])))
