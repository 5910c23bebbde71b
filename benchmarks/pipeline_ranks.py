"""What each rank of `benchmarks/pipeline.py` does, which starts them.

The model is a chain of a GPT's blocks, equally many on each rank, so that stages are equal. All clocks are one: Linux
counts `time.perf_counter` for the whole machine, so that times of different ranks can be compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import weakref
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss
from train import largest, summary

import echelon  # noqa: F401 (registers the backend, where it is not installed)
from echelon.models.chain import Chain
from echelon.models.gpt import GPT, GPTConfig
from echelon.parallel.apply import Strategies, parallelize, pipeline
from echelon.parallel.layout import Grid, Layout
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.pipeline.actions import COMPUTATIONS, Action, Schedule
from echelon.parallel.pipeline.run import Pipeline
from echelon.parallel.pipeline.schedule import SCHEDULES
from echelon.parallel.pipeline.simulate import Costs, simulate

BLOCKS, CHUNKS = 2, 2  # of a rank
SHAPES = {"cpu": (2, 128, 192), "cuda": (2, 1024, 1024)}  # samples of a microbatch, tokens of a sample, features
HEAD = 64  # features
STEPS = {2: 7, 4: 5, 8: 3}  # of a schedule that are timed, by ranks
ROUNDS = {2: 31, 4: 31, 8: 5}  # steps of each contender
PINGS = 50
PEERS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
TOLERANCE = 1e-4  # of a gradient's norm

Spans = list[tuple[Action, float, float]]  # from when to when
Lines = list[list[Spans]]  # of each step, for each rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the result so far, to which is added")
    parser.add_argument("--device", choices=SHAPES, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("echelon")
    grid = Layout(pp=-1).build(arguments.device)
    work = Work(grid, arguments.device)
    unit = microbatch_bytes(work)
    for name in SCHEDULES:
        measured = prepared(work, name)
        found = {"memory": memory(work, measured, unit)}
        if arguments.device == "cpu":
            found["bubble"] = bubble(measured, work)
        add(arguments.json, [str(grid.layout.pp), name], found)
    if arguments.device == "cpu":
        for name in PEERS:
            add(arguments.json, [str(grid.layout.pp), name, "step"], beside_torch(work, name))
    dist.destroy_process_group()


def add(file: Path, path: list[str], found: dict[str, Any]) -> None:
    """To the result, at once: what was measured is not lost if time runs out."""
    if dist.get_rank():
        return
    result = json.loads(file.read_text())
    place = result["ranks"]
    for key in path:
        place = place.setdefault(key, {})
    place |= found
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{path[0]} ranks: {' '.join(path[1:])}", flush=True)


class Work:
    """What is computed: as many microbatches as are asked for, the same on all ranks."""

    def __init__(self, grid: Grid, device: str) -> None:
        self.grid, self.device, self.ranks = grid, torch.device(device), grid.layout.pp
        self.group = grid.mesh("pp").get_group()
        self.gloo = dist.new_group(backend="gloo") if device == "cpu" else self.group
        self._shape = SHAPES[device]

    def chain(self) -> Chain:
        _, _, dim = self._shape
        config = GPTConfig(vocabulary=1, context=1, dim=dim, layers=BLOCKS * self.ranks, heads=dim // HEAD)
        return Chain(*GPT(config).blocks).to(self.device)

    def microbatches(self, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """What goes in, and what should come out."""
        generator = torch.Generator().manual_seed(0)
        both = torch.randn(2, count, *self._shape, generator=generator).to(self.device)
        return list(both[0].unbind()), list(both[1].unbind())


class Measured:
    """A pipeline with what it computes."""

    def __init__(self, pipe: Pipeline, optimizer: Optimizer, work: Work) -> None:
        self.pipe, self.optimizer, self.schedule = pipe, optimizer, pipe.schedule
        self.inputs, self.targets = work.microbatches(self.schedule.microbatches)

    def run(self) -> None:
        self.pipe.run([(x,) for x in self.inputs], self.loss, self.optimizer)

    def loss(self, out: Tensor, number: int) -> Tensor:
        return mse_loss(out, self.targets[number]) / self.schedule.microbatches

    def update(self) -> None:
        """Between steps; versioned schedules have done so in them."""
        if not self.schedule.is_versioned:
            self.optimizer.step()


def prepared(work: Work, name: str) -> Measured:
    """N = 2 D microbatches a step; of a versioned schedule a window of twice as many."""
    strategies = Strategies(schedule=name, chunks=CHUNKS if name == "interleaved" else 1)
    model: Any = parallelize(work.chain(), work.grid, strategies)
    optimizer = Optimizer(partial(torch.optim.SGD, lr=1e-3), model)
    microbatches = (4 if name.startswith("pipedream") else 2) * work.ranks
    return Measured(pipeline(model, work.grid, strategies, microbatches), optimizer, work)


def bubble(measured: Measured, work: Work) -> dict[str, Any]:
    """As measured, and as simulated with what the actions and messages took."""
    schedule = measured.schedule
    lines = [timed(measured) for _ in range(STEPS[work.ranks])]
    spans = [max(end for row in line for *_, end in row) - min(row[0][1] for row in line) for line in lines]
    busy = [sum(end - start for row in line for _, start, end in row) for line in lines]
    bubbles = [1 - each / (schedule.ranks * span) for each, span in zip(busy, spans, strict=True)]
    latency, bandwidth = message(measured.inputs[0], work)
    costs = costs_of(schedule, lines, latency, bandwidth, measured.inputs[0].nbytes)
    simulated = simulate(schedule, costs)
    return {
        "microbatches": schedule.microbatches,
        "measured": summary(bubbles),
        "simulated": simulated.bubble,
        "measured_s": summary(spans),
        "simulated_s": simulated.makespan,
        "costs": {name: getattr(costs, name) for name in Costs.__dataclass_fields__},
    }


def timed(measured: Measured) -> list[Spans]:
    """What each rank was busy with in a step. What follows the last computation of a synchronous one is left out."""
    measured.pipe.times = []
    dist.barrier()
    measured.run()
    kinds = {*COMPUTATIONS, *(("reduce", "step") if measured.schedule.is_versioned else ())}
    mine = [each for each in measured.pipe.times if each[0].kind in kinds]
    measured.pipe.times = None
    measured.update()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def costs_of(schedule: Schedule, lines: Lines, latency: float, bandwidth: float, nbytes: int) -> Costs:
    """The medians of each kind of action at each stage."""
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for action, start, end in (each for line in lines for row in line for each in row):
        took[action.kind, action.stage].append(end - start)
    medians = {key: statistics.median(each) for key, each in took.items()}

    def of(*kinds: str) -> list[float]:
        return [sum(medians.get((kind, stage), 0.0) for kind in kinds) for stage in range(schedule.stages)]

    return Costs(
        forward=of("forward"),
        backward_input=of("backward", "backward_input"),
        backward_weight=of("backward_weight"),
        latency=latency,
        bandwidth=bandwidth,
        activation_bytes=nbytes,
        reduce=medians.get(("reduce", -1), 0.0),
        step=medians.get(("step", -1), 0.0),
    )


def message(like: Tensor, work: Work) -> tuple[float, float]:
    """Latency and bandwidth of messages between the first two ranks."""
    small, large = (ping(each, work) for each in (like.new_empty(1), torch.empty_like(like)))
    return small, like.nbytes / max(large - small, 1e-9)


def ping(memory: Tensor, work: Work) -> float:
    """Seconds that a message takes one way: half the median of there and back."""
    rank, took = dist.get_rank(work.group), []
    for _ in range(PINGS if rank < 2 else 0):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(memory, group=work.group, group_dst=1 - sender)
            else:
                dist.recv(memory, group=work.group, group_src=sender)
        took.append((time.perf_counter() - start) / 2)
    told = torch.tensor([statistics.median(took) if took else 0.0], dtype=torch.float64)
    dist.broadcast(told, 0)
    return told.item()


class Saved:
    """Bytes that are saved for backward passes, but for weights and what went in: each storage, as long as it lives."""

    def __init__(self, model: nn.Module, inputs: list[Tensor]) -> None:
        self._model, self._inputs = model, {each.untyped_storage().data_ptr() for each in inputs}
        self._alive: dict[int, int] = {}
        self.now = self.peak = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        weights = {each.untyped_storage().data_ptr() for each in self._model.parameters()}  # of the version in use
        key = storage.data_ptr()
        if key not in weights and key not in self._inputs and key not in self._alive:
            self._alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)
        return tensor.detach()

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def microbatch_bytes(work: Work) -> dict[str, int]:
    """What this rank saves of one microbatch, and what a copy of its weights has, where stages lie as in 1f1b."""
    measured = prepared(work, "1f1b")
    measured.run()  # after which libraries have what they need for themselves
    measured.update()
    model, stage = measured.pipe.model, work.grid.mesh("pp").get_local_rank()
    span = range(stage * BLOCKS, (stage + 1) * BLOCKS)
    received = torch.empty_like(measured.inputs[0]).requires_grad_()
    before = allocated(work)
    saved = Saved(model, measured.inputs)
    with saved.hooks:
        out = model.compute(span, (measured.inputs[0],), {(span.start - 1, span.start): received} if stage else {})
        kept = measured.loss(out, 0) if stage == work.ranks - 1 else out
    found = {"saved": saved.now, "allocated": allocated(work) - before, "weights": bytes_of(model)}
    del kept
    return found


def memory(work: Work, measured: Measured, unit: dict[str, int]) -> dict[str, Any]:
    """The peak of a step on each rank, in microbatches of one stage, and copies of its weights. On a GPU also by the
    allocator's peak, from which gradients and older versions of weights are taken off.
    """
    model, versions = measured.pipe.model, measured.pipe.versions
    saved = Saved(model, measured.inputs)
    before = allocated(work)
    with saved.hooks:
        measured.run()
    peak = torch.cuda.max_memory_allocated() - before if work.device.type == "cuda" else 0
    measured.update()
    copies = versions.most if versions else 1
    mine = {
        "activations": saved.peak / unit["saved"],
        "weights": copies * bytes_of(model) / unit["weights"],
    }
    if work.device.type == "cuda":
        mine["allocated"] = (peak - copies * bytes_of(model)) / unit["allocated"]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, Any] = {key: [each[key] for each in everyone] for key in mine}
    line = simulate(measured.schedule, Costs())
    found["simulated"] = [each / measured.schedule.chunks for each in line.activations]
    return found | {"microbatches": measured.schedule.microbatches, "unit": unit}


def allocated(work: Work) -> int:
    """Now, on a GPU; its peak is counted from here."""
    if work.device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def bytes_of(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


def beside_torch(work: Work, name: str) -> dict[str, Any]:
    """Seconds of a step, forward and backward, by Echelon and by PyTorch over its group and over Gloo, in turns."""
    measured = prepared(work, name)
    carriers = {"torch": work.group, "torch over gloo": work.gloo}
    peers = {key: Peer(measured, work, name, group) for key, group in carriers.items()}
    contenders = {"echelon": measured.run} | {key: each.run for key, each in peers.items()}
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for turn in range(1 + ROUNDS[work.ranks]):
        for key, run in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            times[key].append(largest(time.perf_counter() - start))
        if turn == 0:
            for each in peers.values():
                each.check(measured.pipe.model)
        measured.update()
        for each in peers.values():
            each.module.zero_grad()
    found: dict[str, Any] = {key: summary(each[1:]) for key, each in times.items()}
    for key in peers:
        ratios = [ours / theirs for ours, theirs in zip(times["echelon"][1:], times[key][1:], strict=True)]
        found[key]["echelon's, of its"] = summary(ratios)
    return found


class Peer:
    """PyTorch's own schedule of the same microbatches on the same stage."""

    def __init__(self, measured: Measured, work: Work, name: str, group: dist.ProcessGroup) -> None:
        rank, ranks = work.grid.mesh("pp").get_local_rank(), work.ranks
        self._first = rank * BLOCKS
        self.module = nn.Sequential(*list(work.chain().children())[self._first : self._first + BLOCKS])
        stage = PipelineStage(self.module, rank, ranks, work.device, group=group)
        count = measured.schedule.microbatches
        self._schedule = PEERS[name](stage, count, loss_fn=lambda out, y: mse_loss(out, y) / count, scale_grads=False)
        self._given = (torch.cat(measured.inputs),) if rank == 0 else ()
        self._target = torch.cat(measured.targets) if rank == ranks - 1 else None

    def run(self) -> None:
        self._schedule.step(*self._given, target=self._target)

    def check(self, model: nn.Module) -> None:
        """Its gradients are ours."""
        ours = dict(model.named_parameters())
        for name, theirs in self.module.named_parameters():
            number, rest = name.split(".", 1)
            gradient = ours[f"{self._first + int(number)}.{rest}"].grad
            error = ((gradient - theirs.grad).norm() / theirs.grad.norm()).item()
            if not error < TOLERANCE:
                raise RuntimeError(f"the gradient of {name} is {error:.1e} from PyTorch's")


if __name__ == "__main__":
    main()
