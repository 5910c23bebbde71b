"""All strategies of a layout, applied to a plain model in the one order that works.

Tensor parallelism first: it renames nothing but replaces parameters. Then attention over split sequences, recomputation
and compilation, each of which wraps what stands. Data parallelism last: it gathers what the others made.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from echelon.models.chain import Given
from echelon.models.held import plain_name
from echelon.parallel import batchnorm, data, fp8, sequence, tensor, tiling
from echelon.parallel.layout import Grid, Layout
from echelon.parallel.loss import chunked_cross_entropy
from echelon.parallel.pipeline.actions import Direction, Schedule
from echelon.parallel.pipeline.crews import held, holders
from echelon.parallel.pipeline.part import Part
from echelon.parallel.pipeline.partition import Balance, bytes_of, linked, partition
from echelon.parallel.pipeline.run import Pipeline
from echelon.parallel.pipeline.schedule import SCHEDULES, make
from echelon.parallel.recompute import Recompute, blocks, recompute
from echelon.parallel.tiling import crews_of, mesh_of_mine

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
TWINS = "twins"  # the view of the ranks that hold the same stages of a bidirectional pipeline
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """How the dimensions of a layout are used. In bf16 and fp16 the optimizer keeps master copies in fp32."""

    stage: Literal[0, 1, 2, 3] = 0  # what is sharded over `data`: nothing, optimizer state, gradients too, all
    sequence: sequence.Kind = "ring"
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    chunk: int | None = None  # rows of logits that exist at a time; None: all
    compile: bool = False
    fp8: bool = False  # whether MLPs and the head multiply in 8 bits; for bf16
    global_batchnorm: bool = False
    schedule: str = "1f1b"  # of a pipeline: one of pipeline.schedule.SCHEDULES
    chunks: int = 1  # stages of each rank of a pipeline, for the schedule "interleaved"
    balance: Balance = "memory"  # what a pipeline's stages have alike
    average_every: int = 0  # local SGD: steps of a rank of dp by itself between averagings; 0: gradients are summed

    def __post_init__(self) -> None:
        known = {"stage": (0, 1, 2, 3), "sequence": get_args(sequence.Kind), "recompute": get_args(Recompute)}
        known |= {"schedule": tuple(SCHEDULES)}
        for name, allowed in (known | {"precision": get_args(Precision)}).items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(map(str, allowed))}")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}: a chunk has at least one row of logits")
        if self.fp8 and self.precision != "bf16":
            raise ValueError(f"fp8 is for the products of training in bf16, and not in {self.precision}")
        if self.average_every < 0:
            raise ValueError(f"average_every={self.average_every}: it counts steps; 0 sums gradients in every step")
        if self.average_every and self.stage:
            raise ValueError(
                f"average_every={self.average_every} with stage={self.stage}: ranks that step by themselves each hold "
                "all of the model and its state: use stage=0"
            )


def summed_over(grid: Grid, strategies: Strategies) -> DeviceMesh:
    """The ranks whose gradients are summed in every step, and over which targets are therefore counted: those of
    `data`, or in local SGD those of `cp`, since there each rank of dp has a loss of its own.
    """
    return grid.mesh("cp" if strategies.average_every else "data")


def parallelize(model: nn.Module, grid: Grid, strategies: Strategies) -> nn.Module:
    """Make of a plain model, equal on all ranks, the one to train on this rank of the grid: of a pipeline, its links
    alone (which `cut` may have left already).
    """
    if not is_cut(model):
        check(model, grid.layout, strategies)
        model = cut(model, grid, strategies)
    model = model.to(DTYPES[strategies.precision])
    model = tensor.split(model, grid.mesh("tp"), sequence_parallel=splits_sequences(model))
    if grid.mesh("cp").size() > 1:
        model = sequence.scatter(model, grid.mesh("cp"), strategies.sequence)
    if (strategies.chunk is not None or strategies.fp8) and hasattr(model, "head"):
        head: Any = model.get_submodule("head")
        in_chunks = head.loss if grid.mesh("tp").size() > 1 else partial(chunked_cross_entropy, in_fp8=strategies.fp8)
        head.loss = partial(in_chunks, chunk=strategies.chunk or sys.maxsize)
    if strategies.fp8:
        model = fp8.convert(model)
    if grid.layout.is_tiled:
        directions = _directions(grid.layout, strategies)
        tiling.tile(model, grid, directions, global_batchnorm=strategies.global_batchnorm)
    elif strategies.global_batchnorm:
        model = batchnorm.synchronize(model, summed_over(grid, strategies))
    model = recompute(model, strategies.recompute)
    if strategies.compile:
        for block in blocks(model):
            block.compile()
    return _over_data(model, grid, strategies)


def _directions(layout: Layout, strategies: Strategies) -> tuple[Direction, ...]:
    return _placed(layout, strategies).directions if layout.depth > 1 else ("down",)


def _over_data(model: nn.Module, grid: Grid, strategies: Strategies) -> nn.Module:
    if grid.layout.depth > 1 and _placed(grid.layout, strategies).is_bidirectional:
        return _over_both_directions(model, grid, strategies)
    if grid.layout.depth > 1 and _placed(grid.layout, strategies).is_versioned:
        return data.replicate(model, grid.mesh("data"), alone=True)
    if strategies.stage == 0:
        apart = grid.mesh("dp") if strategies.average_every else None
        if apart is None and grid.layout.size == 1:
            return model  # whose gradients are the sums already
        return data.replicate(model, summed_over(grid, strategies), apart=apart)
    if strategies.stage < 3:
        return data.shard(model, grid.mesh("data"), strategies.stage)
    model = data.shard(model, grid.mesh("hybrid" if grid.layout.replicate > 1 else "shard_cp"), 3)
    if grid.layout.depth > 1:
        spans: Any = model.spans
        data.prefetch_within(model, [_blocks_of(model, span) for span in spans])
    return model


def cut(model: nn.Module, grid: Grid, strategies: Strategies, example: Given | None = None) -> nn.Module:
    """Leave of a plain model this rank's links of a pipeline, also on the meta device. (The balance "time" needs an
    `example`: the arguments of a microbatch.)
    """
    if grid.layout.depth == 1:
        return model
    chain: Any = linked(model)
    chain.splits_sequences = splits_sequences(model)
    spans = spans_of(chain, grid.layout, strategies, example)
    mine, schedule, crews = grid.mesh("pp").get_local_rank(), _placed(grid.layout, strategies), crews_of(grid.layout)
    chain.keep(held(schedule, spans, crews), mine)
    chain.spans = spans
    first = grid.layout.groups("pp")[0]  # which has the first rank of the world that holds any link
    firsts = {link: first[holders(schedule, crews, stage)[0]] for stage, span in enumerate(spans) for link in span}
    chain.first_holder = lambda name: firsts[chain.link_of(name)]
    return chain  # type: ignore[no-any-return]


def spans_of(model: nn.Module, layout: Layout, strategies: Strategies, example: Given | None = None) -> list[range]:
    """The links of each stage of a pipeline."""
    return partition(model, layout.depth * strategies.chunks, strategies.balance, example=example)


def pipeline(model: Any, grid: Grid, strategies: Strategies, microbatches: int) -> Pipeline:
    """What runs a parallelized model on this rank, for so many microbatches a step."""
    schedule = make(strategies.schedule, grid.layout.depth, microbatches, chunks=strategies.chunks)
    return Pipeline(
        model,
        model.spans,
        schedule,
        grid.mesh("pp").get_group(),
        crews=crews_of(grid.layout),
        grounds=getattr(model, "grounds", {}),
    )


def part_of(
    model: Any, layout: Layout, strategies: Strategies, rank: int, microbatches: int, example: Given | None = None
) -> Part:
    """What a rank has of a whole model on the meta device, and how often it computes it."""
    if layout.depth == 1:
        return Part(model)
    schedule = make(strategies.schedule, layout.depth, microbatches, chunks=strategies.chunks)
    spans, inside = spans_of(model, layout, strategies, example), layout.group("pp", rank).index(rank)
    return Part(linked(model), spans, schedule, inside, crews_of(layout))


def _blocks_of(model: Any, span: range) -> list[str]:
    """The names of a span's parts, as far as this rank has them."""
    here = dict(model.named_modules())
    return [name for link in span for name in model.parts(link) if name in here]


def is_cut(model: nn.Module) -> bool:
    return hasattr(model, "spans")


def splits_sequences(model: nn.Module) -> bool:
    """Whether a model has sequences that can be split."""
    return bool(getattr(model, "splits_sequences", hasattr(model, "tokens")))


def _placed(layout: Layout, strategies: Strategies) -> Schedule:
    """A schedule of the kind: where stages lie does not depend on the number of microbatches."""
    return make(strategies.schedule, layout.depth, 2 * layout.depth, chunks=strategies.chunks)


def _over_both_directions(model: Any, grid: Grid, strategies: Strategies) -> nn.Module:
    """Each stage over the ranks that hold it, in whichever direction."""
    layout, schedule, crews = grid.layout, _placed(grid.layout, strategies), crews_of(grid.layout)
    pipelines = np.array(layout.groups("pp"))
    sets = [sorted(pipelines[:, holders(schedule, crews, stage)].flatten().tolist()) for stage in range(layout.depth)]
    meshes = {tuple(each): mesh_of_mine(grid, [each], TWINS) for each in dict.fromkeys(map(tuple, sets))}
    of_link = {link: meshes[tuple(sets[stage])] for stage, span in enumerate(model.spans) for link in span}

    def mesh_of_name(name: str) -> DeviceMesh:
        found = of_link[model.link_of(plain_name(name))]
        assert found is not None
        return found

    largest = max((mesh for mesh in meshes.values() if mesh is not None), key=lambda mesh: mesh.size())
    return data.replicate(model, largest, mesh_of=mesh_of_name)


def check(model: nn.Module, layout: Layout, strategies: Strategies, example: Given | None = None) -> None:
    """Whether a model, with or without memory, can be split so; the error says what can. (A pipeline with the balance
    "time" needs an `example`.)
    """
    name = type(model).__name__
    if layout.is_tiled or layout.stages is not None:
        _check_tiles(model, layout, strategies)
    if layout.depth > 1:
        _check_pipeline(model, layout, strategies, example)
    if layout.tp > 1 and not hasattr(model, "blocks"):
        raise ValueError(f"{layout!r}: {name} has no `blocks` of attention and MLP that tp could split: use dp alone")
    if layout.cp > 1 and not hasattr(model, "tokens"):
        raise ValueError(f"{layout!r}: {name} has no sequences of `tokens` that cp could split: use dp or tp")
    if layout.tp > 1:
        tensor.check(model, layout.tp)
    if strategies.fp8:
        if layout.tp > 1:
            raise ValueError(f"{layout!r}: fp8 is for tp=1, since a scale is of a whole matrix: use dp, or fp8 = false")
        fp8.check_model(model)


def _check_tiles(model: nn.Module, layout: Layout, strategies: Strategies) -> None:
    name = type(model).__name__
    if any(stage.cp > 1 or stage.tp > 1 for stage in layout.grids):
        raise ValueError(f"{layout!r}: tiles, and stages that differ, go with dp and pp, and not with cp and tp")
    if layout.is_tiled and hasattr(model, "tokens"):
        raise ValueError(f"{layout!r}: {name} has sequences of tokens and no images that sp could cut: use cp")
    if strategies.stage or strategies.compile or strategies.average_every:
        raise ValueError(
            f"{layout!r}: tiles go with stage = 0, compile = false and average_every = 0: their gradients are summed "
            "whole in every step"
        )
    if layout.depth > 1:
        schedule = _placed(layout, strategies)
        if schedule.splits_backward or schedule.is_versioned:
            raise ValueError(f"{layout!r}: {schedule.name} does not go with tiles: use gpipe, 1f1b, gems or gems-gpipe")
        crews_of(layout).check(schedule)
        if shared := linked(model).shared():
            raise ValueError(
                f"{layout!r}: stages of different sizes cannot share {' and '.join(shared[0])}: untie them"
            )


def _check_pipeline(model: nn.Module, layout: Layout, strategies: Strategies, example: Given | None) -> None:
    chain, schedule, name = linked(model), _placed(layout, strategies), strategies.schedule
    held_bytes = bytes_of(chain)
    for rank, spans in enumerate(held(schedule, spans_of(chain, layout, strategies, example), crews_of(layout))):
        if not any(held_bytes[link] for span in spans for link in span):
            raise ValueError(
                f"{layout!r}: rank {rank} of the pipeline would hold no parameters of {type(model).__name__}: choose a "
                "smaller pp, or say with balance=[…] how many links each stage gets"
            )
    if strategies.average_every:
        raise ValueError(f"{layout!r}: a pipeline sums gradients in every step: use average_every=0, or pp=1")
    if schedule.splits_backward and strategies.compile:
        raise ValueError(f"{name} puts off gradients, which compiled blocks cannot: use compile=False, or 1f1b")
    if (schedule.is_bidirectional or schedule.is_versioned) and (layout.tp, layout.cp, strategies.stage) != (1, 1, 0):
        raise ValueError(
            f"{layout!r}, stage {strategies.stage}: {name} goes with dp alone, in stage 0: "
            "use 1f1b, interleaved or zero-bubble with tp, cp and the other stages"
        )
    if schedule.is_versioned and chain.shared():
        names = " and ".join(chain.shared()[0])
        raise ValueError(
            f"{name} updates each stage by itself, so that no two can share {names}: use tied = false, or a "
            "synchronous schedule"
        )
    if schedule.is_versioned and strategies.precision == "fp16":
        raise ValueError(f"{name} has no time to scale the loss for fp16: use bf16")
