"""What 8-bit weights cost in quality and save in memory and time: `python benchmarks/quantize.py`.

A small byte-level Llama learns Python's own standard library for a minute or two, and reads files of it that it has not
seen: in fp32 and bf16, each as it is and quantized. (`--model FOLDER` takes a Hugging Face folder instead, with its own
tokenizer.) Times are those of a larger Llama with random weights, where weights and not the calls are what takes time:
steps that write one token and eight, and one that reads a prompt, on one core, with all contenders taking turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from echelon import models
from echelon.models import hub
from echelon.models.llama import LlamaConfig
from echelon.serve.perplexity import perplexity
from echelon.serve.quantize import KINDS, quantize, weight_bytes
from echelon.serve.text import Text

LENGTH, READ = 128, 50_000  # tokens of a piece, and of the held-out text
SMALL = {"vocabulary": 256, "context": LENGTH, "dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_dim": 352}
LARGE = LlamaConfig(vocabulary=256, dim=1024, layers=8, heads=16, kv_heads=4, mlp_dim=2816)
STEPS = {"write 1": (1, 1), "write 8": (8, 1), "read 256": (1, 256)}  # rows, and tokens of each
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ON_CPUS = [kind for kind in KINDS if kind != "fp8"]  # which a CPU multiplies very slowly
CONTENDERS = {f"{name} {kind}".strip(): (name, kind) for name in DTYPES for kind in ("", *ON_CPUS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face folder, instead of training")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    parser.add_argument("--rounds", type=int, default=9, help="of each timed step (default: 9)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        of_text = arguments.model or trained(Path(folder), arguments.steps)
        quality = read(of_text, CONTENDERS)
    times = timed(arguments.rounds)
    rows = {name: quality[name] | {"times": times[name]} for name in CONTENDERS}
    print_table(rows)
    if arguments.json:
        about: dict[str, Any] = {"what": __doc__.splitlines()[0], "torch": torch.__version__, "cores": os.cpu_count()}
        about |= {"model": str(arguments.model or SMALL), "steps": arguments.steps, "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def python_files(held_out: bool) -> bytes:
    """Of the standard library; every twentieth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for index, file in enumerate(files) if (index % 20 == 19) is held_out)


def trained(folder: Path, steps: int, model: dict[str, int] = SMALL, device: str = "cpu") -> Path:
    """A Hugging Face folder with a model that has learned from the rest."""
    from echelon.train.config import parse
    from echelon.train.loop import Trainer

    (folder / "python.txt").write_bytes(python_files(held_out=False))
    config = parse(
        {
            "model": {"name": "llama2-7b", **model},
            "data": {"kind": "text", "path": str(folder / "python.txt"), "tokenizer": "bytes", "length": LENGTH},
            "train": {"steps": steps, "batch": 16, "device": device},
            "optimizer": {"lr": 3e-3},
            "schedule": {"warmup": 30},
        }
    )
    trainer = Trainer(config, folder / "run")
    trainer.run()
    hub.save(trainer.model, folder / "model")
    return folder / "model"


def read(folder: Path, contenders: dict[str, tuple[str, str]], device: str = "cpu") -> dict[str, dict[str, float]]:
    """Perplexity on the held-out text, and what the weights take, by contender."""
    tokens = Text.of_folder(folder).encode(python_files(held_out=True).decode())[:READ]
    found = {}
    for name, (dtype, kind) in contenders.items():
        model = hub.load(folder, dtype=DTYPES[dtype]).to(device).eval()
        if kind:
            quantize(model, kind)
        found[name] = {"perplexity": perplexity(model, tokens, LENGTH), "weights MB": weight_bytes(model) / 1e6}
    return found


@torch.inference_mode()
def timed(rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of each kind of step, and how many times faster than fp32 it was in the same rounds."""
    plain = models.build(LARGE).eval().requires_grad_(False)
    contenders = {}
    for name, (dtype, kind) in CONTENDERS.items():
        model = copy.deepcopy(plain).to(DTYPES[dtype])
        contenders[name] = quantize(model, kind) if kind else model
    found: dict[str, dict[str, Any]] = {name: {} for name in CONTENDERS}
    for step, shape in STEPS.items():
        tokens = torch.randint(LARGE.vocabulary, shape, generator=torch.Generator().manual_seed(0))
        took: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for turn in range(1 + rounds):
            for name, model in contenders.items():
                start = time.perf_counter()
                model(tokens)
                if turn:  # the first is to warm up
                    took[name].append((time.perf_counter() - start) * 1e3)
        for name, each in took.items():
            ratios = [theirs / ours for theirs, ours in zip(took["fp32"], each, strict=True)]
            found[name][step] = {"ms": statistics.median(each), "times faster": statistics.median(ratios)}
    return found


def print_table(rows: dict[str, Any]) -> None:
    table = Table(title="8-bit weights: quality on held-out text, and steps of a larger model", title_justify="left")
    for column in ("", "perplexity", "change", "weights, MB", *(f"{step}, ms" for step in STEPS)):
        table.add_column(column, justify="right" if column else "left")
    first = rows["fp32"]["perplexity"]
    for name, row in rows.items():
        times = [f"{row['times'][step]['ms']:.1f} ({row['times'][step]['times faster']:.2f}×)" for step in STEPS]
        change = f"{(row['perplexity'] / first - 1) * 100:+.2f} %"
        table.add_row(name, f"{row['perplexity']:.4f}", change, f"{row['weights MB']:.2f}", *times)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
