"""Training on one GPU: `python3 benchmarks/h200/train_gpt2.py --peer nanoGPT/`, a folder with nanoGPT's model.py.

GPT-2 of 124 million parameters, sequences of 1024 tokens: Echelon's own loop in bf16 and in fp8, and the peer's model
as its authors train it (compiled, autocast to bf16, fused AdamW, gradients clipped). All begin with the same values and
see the same samples of Python's standard library and of the packages beside it, cut into tokens by a tokenizer that is
trained on them here. A speed is that of the median of windows of ten steps, after the first thirty; a loss is that of
samples held out. Training is chaotic: sums on a GPU come in any order, and the same program ends with another loss each
time. So losses are compared over several seeds, each with its own first values and order of samples.

Then a Llama of 1.2 billion parameters in bf16, on sequences of 4096 tokens: the share of the GPU's peak (MFU), and the
memory it takes beside the plan.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import echelon  # noqa: E402, F401 (registers the backend, where it is not installed)
from echelon.models import hub  # noqa: E402
from echelon.models.presets import build  # noqa: E402
from echelon.parallel.apply import Strategies  # noqa: E402
from echelon.plan.flops import training_flops  # noqa: E402
from echelon.plan.hardware import peak_flops  # noqa: E402
from echelon.train import config as settings  # noqa: E402
from echelon.train.checks import check, meta_model  # noqa: E402
from echelon.train.data import Loader, Order, open_sources  # noqa: E402
from echelon.train.data.documents import Files, of_files  # noqa: E402
from echelon.train.data.prepare import fitting_dtype, prepare, useful_workers  # noqa: E402
from echelon.train.data.tokenizer import open_tokenizer  # noqa: E402
from echelon.train.evaluate import Evaluation  # noqa: E402
from echelon.train.loop import Trainer  # noqa: E402
from echelon.train.schedule import learning_rate  # noqa: E402

VOCABULARY = 50304  # GPT-2's 50257, and a few that are never targets, so that matrices divide evenly; as the peer's
WINDOW, WARMUP = 10, 30  # steps
LEARNED_FROM = 2**23  # bytes of text that the tokenizer is made of
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="a folder with a model.py that has nanoGPT's GPT and GPTConfig")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step (default: 64)")
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--seeds", type=int, default=3, help="how often each contender trains (default: 3)")
    parser.add_argument("--only", choices=("gpt2", "llama"), help="one of the two parts")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU that PyTorch sees")
    result: dict[str, Any] = {"what": __doc__.splitlines()[0], "device": torch.cuda.get_device_name()}
    result |= {"torch": torch.__version__}
    for _ in measure(result, arguments):
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def measure(result: dict[str, Any], arguments: argparse.Namespace) -> Iterator[None]:
    """Fill in the result, a part at a time."""
    if arguments.only != "gpt2":
        result["llama"] = llama()
        yield
    if arguments.only != "llama":
        result["gpt2"] = {"batch": arguments.batch, "steps": arguments.steps, "contenders": {}}
        yield from compare(result["gpt2"], arguments.seeds, arguments.peer)


def compare(found: dict[str, Any], seeds: int, peer: Path | None) -> Iterator[None]:
    contenders: dict[str, Callable[[settings.Config, Path], dict[str, Any]]] = {
        "echelon, fp8": lambda config, folder: train(in_fp8(config), folder / "fp8"),
        "echelon, bf16": lambda config, folder: train(config, folder / "bf16"),
    }
    if peer is not None:
        contenders = {"peer": lambda config, folder: train_peer(peer, config, folder)} | contenders
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("making tokens of Python's files", flush=True)
        found |= write_tokens(folder / "text.bin")
        for seed, (contender, run) in itertools.product(range(seeds), contenders.items()):
            config = gpt2_config(folder, found["batch"], found["steps"], seed)
            if not (first := Path(config.model["init"])).exists():  # what all begin with
                model: Any = build("gpt2", vocabulary=VOCABULARY)
                model.initialize(seed)
                hub.save(model, first)
            steps, batch = config.train.steps, config.train.batch
            print(f"{contender}, seed {seed}: {steps} steps of {batch} × {config.length} tokens", flush=True)
            with alone():
                found["contenders"].setdefault(contender, []).append(run(config, folder / f"seed {seed}"))
            yield


def gpt2_config(folder: Path, batch: int, steps: int, seed: int) -> settings.Config:
    return settings.Config(
        model={"init": str(folder / f"seed {seed}" / "first")},
        data=settings.Data(kind="tokens", path=str(folder / "text.bin")),
        train=settings.Train(steps=steps, batch=batch, seed=seed, eval_samples=1024, log_every=WINDOW),
        optimizer=settings.Optimizer(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=settings.Schedule(warmup=steps // 3),
        strategies=Strategies(precision="bf16", compile=True, chunk=16384),
        checkpoint=settings.Checkpoint(resume="never"),
        record=settings.Record(steps=0),
    )


def in_fp8(config: settings.Config) -> settings.Config:
    return replace(config, strategies=replace(config.strategies, fp8=True))


def write_tokens(path: Path) -> dict[str, Any]:
    """Python's files as tokens, by a byte-level BPE of GPT-2's size that is made of some of them."""
    import tokenizers

    paths = sysconfig.get_paths()
    documents = of_files([f"{paths[place]}/**/*.py" for place in ("stdlib", "platlib")])
    learner = tokenizers.ByteLevelBPETokenizer()
    learner.train_from_iterator(some_text(documents), vocab_size=50257, show_progress=False)
    learner.save(str(path.with_name("tokenizer.json")))
    tokenizer = open_tokenizer(str(path.with_name("tokenizer.json")))
    workers = useful_workers(documents.bytes, tokenizer)
    dtype = fitting_dtype(tokenizer)
    written = prepare(documents.pieces(), tokenizer, path, dtype=dtype, workers=workers)
    return {"tokens": written.tokens, "files": written.documents, "vocabulary": written.vocabulary}


def some_text(documents: Files) -> Iterator[str]:
    """Every so-manieth file, until there is enough."""
    every = max(documents.bytes // LEARNED_FROM, 1)
    for path in documents.paths[::every]:
        yield path.read_text(errors="ignore")


def train(config: settings.Config, folder: Path) -> dict[str, Any]:
    trainer = Trainer(config, folder)
    seconds, losses = [], []
    for _ in range(config.train.steps):
        trainer.take_step()
        losses.append(trainer.loss)
        note_time(seconds, trainer.step)
    peak = torch.cuda.max_memory_allocated()
    trainer.evaluate()
    trainer.close()
    return figures(config, seconds, peak, trainer.held_out, losses)


def train_peer(peer: Path, config: settings.Config, folder: Path) -> dict[str, Any]:
    """As its authors train it: nothing is waited for within a window."""
    config = check(config, 1)
    grid, sources = config.layout.build("cuda"), open_sources(config, folder)
    how = {"kind": "ring", "causal": True, "device": DEVICE}
    order = Order(len(sources.train), config.train.seed)
    loader = Loader(sources.train, order, grid, batch=config.train.batch, micro_batch=config.train.batch, **how)
    model = peer_model(peer, config.architecture, folder / "first")
    optimizer = model.configure_optimizers(
        config.optimizer.weight_decay, config.optimizer.lr, config.optimizer.betas, "cuda"
    )
    compiled, seconds, losses = torch.compile(model), [], []
    for step in range(config.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.steps, config.optimizer.lr, config.schedule)
        (given,) = loader.load(step * config.train.batch)
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = compiled(given["tokens_BS"], given["targets_BS"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        note_time(seconds, step + 1)

    def as_ours(tokens_BS: torch.Tensor, targets_BS: torch.Tensor, **_: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            mean: torch.Tensor = model(tokens_BS, targets_BS)[1]
        return mean * targets_BS.numel()

    as_ours.eval, as_ours.train, as_ours.parameters = model.eval, model.train, model.parameters
    peak = torch.cuda.max_memory_allocated()
    evaluation = Evaluation(config, sources.held_out, grid, **how)
    found = figures(config, seconds, peak, evaluation.run(as_ours)["loss"], torch.stack(losses).tolist())
    loader.close()
    evaluation.close()
    return found


def peer_model(peer: Path, shape: Any, first: Path) -> Any:
    """The peer's model with our first values. Where a Hugging Face folder has y = x W, it has y = x Wᵀ."""
    from safetensors.torch import load_file

    spec = importlib.util.spec_from_file_location("peer", peer / "model.py" if peer.is_dir() else peer)
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer"] = module
    spec.loader.exec_module(module)
    model = module.GPT(
        module.GPTConfig(
            block_size=shape.context,
            vocab_size=shape.vocabulary,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.dim,
            dropout=0.0,
            bias=True,
        )
    )
    values = {}
    for name, value in load_file(first / "model.safetensors").items():
        turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        values[f"transformer.{name.removeprefix('transformer.')}"] = value.T if turned else value
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert missing in ([], ["lm_head.weight"]), missing  # which is the embedding's
    assert not unexpected, unexpected
    return model.to(DEVICE)


def note_time(seconds: list[float], step: int) -> None:
    """At the end of each window after the first steps."""
    if step >= WARMUP and step % WINDOW == 0:
        torch.cuda.synchronize()
        seconds.append(time.perf_counter())


def figures(
    config: settings.Config, times: list[float], peak: int, held_out: float, losses: list[float]
) -> dict[str, Any]:
    """Times are those of the windows' ends."""
    windows = [(after - before) / WINDOW for before, after in itertools.pairwise(times)]
    median = statistics.median(windows)
    tokens = config.train.batch * config.length
    flops = config.train.batch * training_flops(meta_model(config), length=config.length)
    return {
        "ms a step": 1e3 * median,
        "slowest and fastest": [1e3 * max(windows), 1e3 * min(windows)],
        "tokens/s": tokens / median,
        "mfu": flops / median / peak_flops(DEVICE, "bf16"),
        "held-out loss": held_out,
        "loss of the last steps": statistics.fmean(losses[-WINDOW:]),
        "losses": [round(statistics.fmean(losses[at : at + WINDOW]), 4) for at in range(0, len(losses), WINDOW)],
        "peak GiB": peak / 2**30,
    }


def llama() -> dict[str, Any]:
    config = settings.Config(
        model={"name": "llama3.2-1b"},
        data=settings.Data(kind="synthetic", length=4096),
        train=settings.Train(steps=60, batch=4, eval_samples=0, log_every=WINDOW),
        strategies=Strategies(precision="bf16", compile=True, chunk=4096),
        checkpoint=settings.Checkpoint(resume="never"),
        record=settings.Record(steps=0),
    )
    with tempfile.TemporaryDirectory() as name, alone():
        print(f"llama: {config.train.steps} steps of {config.train.batch} × {config.length} tokens", flush=True)
        found = train(config, Path(name) / "run")
        memory = json.loads((Path(name) / "run" / "memory.json").read_text())
    return {"batch": config.train.batch, "length": config.length, **found, "memory": memory["rank 0"]}


@contextmanager
def alone() -> Iterator[None]:
    """Without what others have left."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def show(result: dict[str, Any]) -> None:
    if "gpt2" in result:
        contenders = result["gpt2"]["contenders"]
        print(
            f"{'GPT-2 124M':16} {'tokens/s':>10} {'× peer':>7} {'MFU':>6} {'GiB':>6}  held-out losses, from the peer's"
        )
        for name, runs in contenders.items():
            speed, mfu, peak = (
                statistics.median(run[kind] for run in runs) for kind in ("tokens/s", "mfu", "peak GiB")
            )
            losses = [run["held-out loss"] for run in runs]
            ratio, beside = "", ""
            if peers := contenders.get("peer", [])[: len(runs)]:
                ratio = f"{speed / statistics.median(run['tokens/s'] for run in peers):.3f}"
                apart = [loss - run["held-out loss"] for loss, run in zip(losses, peers, strict=True)]
                beside = f"; mean {statistics.fmean(apart):+.4f} ({', '.join(f'{each:+.4f}' for each in apart)})"
            told = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{name:16} {speed:10,.0f} {ratio:>7} {mfu:6.1%} {peak:6.1f}  {told}{beside}")
    if "llama" in result:
        each = result["llama"]
        print(f"Llama 1.2B: {each['tokens/s']:,.0f} tokens/s, MFU {each['mfu']:.1%}, peak {each['peak GiB']:.1f} GiB")
        for kind, held in each["memory"]["measured"].items():
            print(f"  {kind:12} {held / 2**30:7.2f} GiB, planned {each['memory']['predicted'][kind] / 2**30:7.2f}")


if __name__ == "__main__":
    main()
