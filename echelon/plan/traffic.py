"""What each dimension of a layout sends in a step: payload bytes by view and operation, as the recorder counts them.

A pure function of a plain model's shapes (on the meta device they cost nothing): every strategy knows its own traffic,
and this adds them up. A step is one forward and backward pass and the optimizer's update, without recomputation, in
which every block's gradient is needed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.parallel import batchnorm, buckets, data_traffic, loss, sequence, tensor
from echelon.parallel.apply import DTYPES, Strategies
from echelon.parallel.layout import Layout
from echelon.plan.memory import STATE, local_shape

Traffic = Counter[tuple[str, str]]  # by view and operation
_NUMBER = 8  # bytes of a count or a norm


def traffic(
    model: nn.Module, layout: Layout, strategies: Strategies, batch: int, length: int = 1, rank: int = 0
) -> Traffic:
    """For a global batch of so many samples, each a sequence of `length` tokens (an image's patches)."""
    place = layout.coordinates(rank)
    grid = layout.grids[place["pp"]]
    element = DTYPES[strategies.precision].itemsize
    samples, tokens = batch // layout.dp, length // grid.cp
    sent: Traffic = Counter()

    def add(view: str, *parts: dict[str, int]) -> None:
        for part in parts:
            for operation, payload in part.items():
                sent[view, operation] += payload

    blocks: list[Any] = list(getattr(model, "blocks", []))
    kv_heads = tensor.kv_heads_of(blocks[0].attention) if blocks else 0
    splits = hasattr(model, "tokens")  # whether its sequences can be split
    if grid.tp > 1:
        hidden = blocks[0].attention.out.weight.shape[0]
        add("tp", tensor.traffic(len(blocks), samples, tokens, hidden, grid.tp, element, splits))
        add("tp", *loss.traffic(samples * (tokens if splits else 1), grid.tp, element))
        shares = [
            parameter.numel()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and tensor.shares_gradient(name, kv_heads, grid.tp, splits)
        ]
        add("tp", {"all_reduce": sum(shares) * element})
    if grid.cp > 1:
        for block in blocks:
            heads = kv_heads * block.attention.queries_per_key // grid.tp
            local = max(kv_heads // grid.tp, 1)
            shape = samples, length, heads, local, block.attention.head_dim, grid.cp, element
            add("cp", *sequence.traffic(strategies.sequence, *shape))
    summed = "cp" if strategies.average_every else "data"
    ranks = len(layout.group(summed, rank))
    if strategies.global_batchnorm:
        for norm in (module for module in model.modules() if isinstance(module, _BatchNorm)):
            add(summed, *batchnorm.traffic(norm.num_features, ranks, element))
    held = _held(model, kv_heads, grid.tp, place["tp"], element)
    if strategies.stage == 3:
        shards = len(layout.group("shard_cp", rank))
        told = data_traffic.traffic(held, 3, shards, replicas=layout.replicate)
        add("replicate", {"all_reduce": told.pop("all_reduce", 0)})
        add("shard_cp", told)
    else:
        add(summed, data_traffic.traffic(held, strategies.stage, ranks))
    if ranks > 1:
        add(summed, {"all_reduce": _NUMBER})  # how many targets count
    for view in ("tp", "cp") if strategies.average_every else ("world",):
        if len(layout.group(view, rank)) > 1:
            add(view, {"all_reduce": _NUMBER})  # the gradients' norm
    return +sent


def averaging(
    model: nn.Module, layout: Layout, strategies: Strategies, optimizer: str = "adamw", rank: int = 0
) -> Traffic:
    """What one averaging of local SGD sends: what the optimizer updates (in low precision its copies) and its state, by
    the optimizer's name in `memory.STATE`, and what a batch normalisation remembers.
    """
    if layout.dp == 1:
        return Counter()
    dtype = DTYPES[strategies.precision]
    blocks: list[Any] = list(getattr(model, "blocks", []))
    kv_heads = tensor.kv_heads_of(blocks[0].attention) if blocks else 0
    place = layout.coordinates(rank)
    updated = _held(model, kv_heads, layout.grids[place["pp"]].tp, place["tp"], max(dtype.itemsize, 4))
    buffers = sum(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point()) * dtype.itemsize
    each = data_traffic.bucket_bytes(updated, parts=None)
    return Counter({("dp", "all_reduce"): each * (1 + STATE[optimizer] // 4) + buffers + _NUMBER})


def _held(model: nn.Module, kv_heads: int, tp: int, place: int, element: int) -> dict[str, list[data_traffic.Held]]:
    """What tensor parallelism leaves of each parameter on a rank."""

    def local(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return local_shape(shape, tensor.split_dimension(name, kv_heads, tp), tp, place)

    return {
        unit: [
            data_traffic.Held(local(name, tuple(parameter.shape)), element, parameter.requires_grad)
            for name, parameter in parameters.items()
        ]
        for unit, parameters in buckets.units(model).items()
    }
