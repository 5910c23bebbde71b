"""What each dimension of a layout sends in a step: payload bytes by view and operation, as the recorder counts them.

A pure function of a plain model's shapes (on the meta device they cost nothing): every strategy knows its own traffic,
and this adds them up. A step is one forward and backward pass and the optimizer's update, without recomputation, in
which every block's gradient is needed.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import nn

from echelon.models.chain import Given, apart_of
from echelon.parallel import batchnorm, buckets, data_traffic, loss, sequence, tensor
from echelon.parallel.apply import DTYPES, TWINS, Strategies, part_of
from echelon.parallel.buckets import lay_out
from echelon.parallel.layout import Layout
from echelon.parallel.pipeline.part import Part, StagePasses, edge_kinds
from echelon.plan.images import Images, Traffic
from echelon.plan.memory import STATE, local_shape

_NUMBER = 8  # bytes of a count or a norm


def traffic(
    model: Any,
    layout: Layout,
    strategies: Strategies,
    batch: int,
    length: int = 1,
    rank: int = 0,
    *,
    microbatches: int = 1,
    example: Given | None = None,
    images: Images | None = None,
) -> Traffic:
    """For a global batch of so many samples, each a sequence of `length` tokens (an image's patches).

    A pipeline takes the batch in `microbatches`. It and tiles of images need an `example`: the arguments of the plain
    model, on the meta device, for one microbatch of one rank of dp and cp. `images`, made of the same, are for whoever
    asks for several ranks: what these have alike is then computed once.
    """
    place = layout.coordinates(rank)
    grid = layout.grids[place["pp"]]
    own = part_of(model, layout, strategies, rank, microbatches, example)
    samples = batch // layout.dp // own.microbatches
    tiled = None
    if layout.is_tiled:
        tiled = (images or Images(model, layout, strategies, example)).passes(rank, own)
    sent: Traffic = Counter()
    for key, passes in zip(own.forwards, own.passes, strict=True):
        of_a_pass = tiled.sent[key] if tiled else _of_a_pass(model, passes, layout, strategies, samples, length, rank)
        for line, payload in of_a_pass.items():
            sent[line] += passes.count * payload

    def add(view: str, part: dict[str, int], times: int = 1) -> None:
        for operation, payload in part.items():
            sent[view, operation] += times * payload

    element, splits, kv_heads = DTYPES[strategies.precision].itemsize, hasattr(model, "tokens"), _kv_heads(model)
    if grid.tp > 1:
        sizes = {name: each.numel() for name, each in own.model.named_parameters() if each.requires_grad}
        for passes in own.passes:
            names = [name for name in passes.names if tensor.shares_gradient(name, kv_heads, grid.tp, splits)]
            shares = sum(sizes.get(name, 0) for name in names) * element
            add("tp", {"all_reduce": shares}, passes.count if strategies.stage > 1 and own.reductions > 1 else 1)
    summed = _summed(strategies)
    ranks = len(layout.group(summed, rank))
    held = _held(own.model, kv_heads, grid.tp, place["tp"], element)
    if strategies.stage == 3:
        shards, often = len(layout.group("shard_cp", rank)), own.gatherings(held)
        told = data_traffic.traffic(
            held, 3, shards, replicas=layout.replicate, backwards=own.reductions, gatherings=often
        )
        add("replicate", {"all_reduce": told.pop("all_reduce", 0)})
        add("shard_cp", told)
    else:
        copies = ranks * own.holders
        told = data_traffic.traffic(held, strategies.stage, copies, backwards=own.reductions)
        add(TWINS if own.is_bidirectional else summed, told, own.updates)
    if layout.depth > 1:
        kinds = tiled.kinds if tiled else edge_kinds(model, own.spans, example, DTYPES[strategies.precision])
        streams = own.messages(kinds) // (grid.tp if splits else 1)
        add("pp", {"send": streams + own.statistics(element) + _ties(own, held, strategies.stage, layout, rank)})
    if ranks > 1:
        add(summed, {"all_reduce": _NUMBER}, own.updates)  # how many targets count
    for view in ("tp", "cp") if strategies.average_every else ("data",) if own.is_versioned else ("world",):
        if len(layout.group(view, rank)) > 1:
            add(view, {"all_reduce": _NUMBER}, own.updates)  # the gradients' norm
    return +sent


def _of_a_pass(
    model: nn.Module, passes: StagePasses, layout: Layout, strategies: Strategies, samples: int, length: int, rank: int
) -> Traffic:
    """Forward and backward, of one microbatch: all but the gradients of parameters and what goes to other stages."""
    grid = layout.grids[layout.coordinates(rank)["pp"]]
    element, splits, kv_heads = DTYPES[strategies.precision].itemsize, hasattr(model, "tokens"), _kv_heads(model)
    tokens = length // grid.cp
    sent: Traffic = Counter()

    def add(view: str, *parts: dict[str, int]) -> None:
        for part in parts:
            for operation, payload in part.items():
                sent[view, operation] += payload

    if grid.tp > 1:
        hidden = _blocks(model)[0].attention.out.weight.shape[0]
        shape = len(passes.attentions), samples, tokens, hidden, grid.tp, element, splits
        add("tp", tensor.traffic(*shape, embeds=passes.starts, ends=passes.ends))
        if passes.ends:
            add("tp", *loss.traffic(samples * (tokens if splits else 1), grid.tp, element))
    if grid.cp > 1:
        for each in passes.attentions:
            heads, local = kv_heads * each.queries_per_key // grid.tp, max(kv_heads // grid.tp, 1)
            add(
                "cp",
                *sequence.traffic(strategies.sequence, samples, length, heads, local, each.head_dim, grid.cp, element),
            )
    if strategies.global_batchnorm:
        summed = _summed(strategies)
        for norm in passes.norms:
            add(summed, *batchnorm.traffic(norm.num_features, len(layout.group(summed, rank)), element))
    return sent


def averaging(
    model: nn.Module, layout: Layout, strategies: Strategies, optimizer: str = "adamw", rank: int = 0
) -> Traffic:
    """What one averaging of local SGD sends: what the optimizer updates (in low precision its copies) and its state, by
    the optimizer's name in `memory.STATE`, and what a batch normalisation remembers.
    """
    if layout.dp == 1:
        return Counter()
    dtype = DTYPES[strategies.precision]
    place = layout.coordinates(rank)
    updated = _held(model, _kv_heads(model), layout.grids[place["pp"]].tp, place["tp"], max(dtype.itemsize, 4))
    buffers = sum(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point()) * dtype.itemsize
    each = data_traffic.bucket_bytes(updated, parts=None)
    return Counter({("dp", "all_reduce"): each * (1 + STATE[optimizer] // 4) + buffers + _NUMBER})


def _summed(strategies: Strategies) -> str:
    """Over which view gradients are summed."""
    return "cp" if strategies.average_every else "data"


def _blocks(model: nn.Module) -> list[Any]:
    return list(getattr(model, "blocks", []))


def _kv_heads(model: nn.Module) -> int:
    blocks = _blocks(model)
    return tensor.kv_heads_of(blocks[0].attention) if blocks else 0


def _held(model: nn.Module, kv_heads: int, tp: int, place: int, element: int) -> dict[str, list[data_traffic.Held]]:
    """What tensor parallelism leaves of each parameter on a rank."""

    def local(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return local_shape(shape, tensor.split_dimension(name, kv_heads, tp), tp, place)

    apart = apart_of(model)
    return {
        unit: [
            data_traffic.Held(
                local(name, tuple(parameter.shape)), element, parameter.requires_grad, name if name in apart else ""
            )
            for name, parameter in parameters.items()
        ]
        for unit, parameters in buckets.units(model).items()
    }


def _ties(own: Part, held: dict[str, list[data_traffic.Held]], stage: int, layout: Layout, rank: int) -> int:
    """Bytes of gradients that a rank sends to the other stages that share their parameters."""
    total = 0
    for parameters in held.values():
        for each in parameters:
            if not each.apart:
                continue
            count = math.prod(each.shape)
            if stage in (1, 2):
                parts = len(layout.group("data", rank))
                count = lay_out([count], each.element_size, parts)[1] // parts
            elif stage == 3:
                group = layout.group("shard_cp", rank)
                count = math.prod(local_shape(each.shape, 0, len(group), group.index(rank)))
            total += (len(own.model.apart[each.apart].ranks) - 1) * count * each.element_size
    return total
