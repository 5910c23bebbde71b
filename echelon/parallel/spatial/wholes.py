"""From tiles to what all ranks have: means, sums, poolings of everything, losses, the gathered image; and channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.spatial.exchange import fetch, shared, summed
from echelon.parallel.spatial.operations import fitting, refuse, shape, tiled
from echelon.parallel.spatial.tiles import AXES, Tile, Whole, plain


@tiled(torch.cat, torch.concat)
def _cat(tensors: Sequence[Any], dim: int = 0) -> Tile:
    if dim not in (0, 1, -4, -3):
        refuse("cat", f"along dimension {dim}, which is cut")
    whole = next(each.whole for each in tensors if isinstance(each, Tile))
    if any(isinstance(each, Tile) and each.whole != whole for each in tensors):
        refuse("cat", f"of images of {[list(each.shape[2:]) for each in tensors]}")
    return Tile.of(torch.cat([fitting(each, whole, "cat") for each in tensors], dim), whole)


def ordinary(out: Tensor, whole: Whole) -> Tensor:
    """What all ranks have alike. Inside a model each goes back with a gradient of its own; behind it with the same."""
    return shared(out, whole.ground.everyone.size()) if whole.is_outside else out


@tiled(torch.flatten, Tensor.flatten)
def _flatten(x: Tile, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return torch.flatten(gathered(x), start_dim, end_dim)


@tiled(F.prelu, torch.prelu)
def _prelu(x: Tile, weight: Tensor) -> Tile:
    return Tile.of(F.prelu(plain(x), weight), x.whole)


@tiled(torch.chunk, Tensor.chunk)
def _chunk(x: Tile, chunks: int, dim: int = 0) -> tuple[Tile, ...]:
    return tuple(Tile.of(part, x.whole) for part in plain(x).chunk(chunks, _of_channels("chunk", dim)))


@tiled(torch.split, Tensor.split)
def _split(x: Tile, sizes: Any, dim: int = 0) -> tuple[Tile, ...]:
    return tuple(Tile.of(part, x.whole) for part in plain(x).split(sizes, _of_channels("split", dim)))


def _of_channels(name: str, dim: int) -> int:
    if dim % 4 in AXES:
        refuse(name, f"along dimension {dim}, which is cut")
    return dim


@tiled(torch.mean, Tensor.mean)
def _mean(x: Tile, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    dims = _dims(dim)
    out = _sum(x, dim, keepdim, **named)
    return out / math.prod(shape(x)[each] for each in dims)


@tiled(torch.sum, Tensor.sum)
def _sum(x: Tile, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    dims = _dims(dim)
    if not set(dims) & set(AXES):
        with torch._C.DisableTorchFunctionSubclass():
            out = plain(x).sum(dims, keepdim, **named)
        return Tile.of(out, x.whole) if keepdim else refuse("sum", "without keepdim, of channels")
    if not set(AXES) <= set(dims):
        refuse("sum", f"along dimensions {dims}, of which some are cut and some are not")
    return ordinary(summed(plain(x).sum(dims, keepdim, **named), x.whole.ground.everyone), x.whole)


def _dims(dim: Any) -> tuple[int, ...]:
    dims = range(4) if dim is None else [dim] if isinstance(dim, int) else dim
    return tuple(each % 4 for each in dims)


@tiled(F.adaptive_avg_pool2d, torch._C._nn.adaptive_avg_pool2d)
def _adaptive_avg_pool2d(x: Tile, output_size: Any) -> Tensor:
    """A few pixels of all: the sum of what each tile adds to them."""
    local = plain(x)
    sizes = _adaptive_sizes(output_size, x.whole)
    for axis, (size, length) in enumerate(zip(sizes, x.whole.sizes, strict=True)):
        share = local.new_zeros(size, length)
        for output, span in enumerate(_spans(length, size)):
            share[output, span.start : span.stop] = 1 / len(span)
        own = x.whole.here[axis]
        share = share[:, own.start : own.stop]
        local = torch.einsum("ncij,oi->ncoj" if axis == 0 else "ncij,oj->ncio", local, share)
    return ordinary(summed(local, x.whole.ground.everyone), x.whole)


@tiled(F.adaptive_max_pool2d)
def _adaptive_max_pool2d(x: Tile, output_size: Any, return_indices: bool = False) -> Tensor:
    """Of the largest values that tiles have of each window the first is taken, as by one process."""
    local, everyone, (rows, columns) = plain(x), x.whole.ground.everyone, x.whole.here
    height, width = _adaptive_sizes(output_size, x.whole)
    values, places = [], []
    for row in _spans(x.whole.sizes[0], height):
        for column in _spans(x.whole.sizes[1], width):
            down, across = _overlap(row, rows), _overlap(column, columns)
            seen = local[:, :, down.start : down.stop, across.start : across.stop]
            if not seen.shape[2] * seen.shape[3]:
                values.append(local.sum((2, 3)) * 0 - math.inf)
                places.append(torch.zeros_like(values[-1], dtype=torch.int64))
                continue
            value, at = F.adaptive_max_pool2d(seen, 1, return_indices=True)
            values.append(value.flatten(1))
            at = at.flatten(1)
            first = (rows.start + down.start) * x.whole.sizes[1] + columns.start + across.start
            places.append(first + at // len(across) * x.whole.sizes[1] + at % len(across))
    value_BCO, place_BCO = torch.stack(values, 2), torch.stack(places, 2)
    both = torch.stack([value_BCO.detach().double(), place_BCO.double()])
    everyones = [torch.empty_like(both) for _ in range(everyone.size())]
    dist.all_gather(everyones, both, group=everyone)
    all_values, all_places = torch.stack(everyones, 1)
    best = all_values.amax(0)
    first_BCO = all_places.masked_fill(all_values < best, math.inf).amin(0)
    is_mine = (value_BCO.detach().double() == best) & (place_BCO.double() == first_BCO)
    out = summed(torch.where(is_mine, value_BCO, 0.0), everyone)
    return ordinary(out.unflatten(2, (height, width)), x.whole)


def _adaptive_sizes(given: Any, whole: Whole) -> tuple[int, int]:
    sizes = (given, given) if isinstance(given, int) else tuple(given)
    return sizes[0] or whole.sizes[0], sizes[1] or whole.sizes[1]


def _spans(length: int, outputs: int) -> list[range]:
    """What each output of an adaptive pooling sees."""
    return [range(at * length // outputs, -(-(at + 1) * length // outputs)) for at in range(outputs)]


def _overlap(span: range, own: range) -> range:
    """Of this rank's rows, counted from its first."""
    low = max(span.start, own.start)
    return range(low - own.start, max(min(span.stop, own.stop), low) - own.start)


@tiled(F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax)
def _softmax(*_: Any, **__: Any) -> Any:
    refuse("softmax", "take the loss of each pixel by cross_entropy, or gather the tiles first (spatial.gather)")


def gathered(x: Tile) -> Tensor:
    """The whole, on every rank."""
    local = plain(x)
    for axis, group in enumerate(x.whole.ground.groups):
        if group is not None:
            length = x.whole.sizes[axis]
            local = fetch(local, AXES[axis], length, ((range(length),),) * group.size(), group)
    return ordinary(local, x.whole)


@tiled(F.cross_entropy)
def _cross_entropy(
    x: Tile,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Of each pixel; the targets are the whole image's, or this tile's. It is the whole's loss, on every rank."""
    if reduction not in ("mean", "sum") or label_smoothing or (size_average, reduce) != (None, None):
        refuse("cross_entropy", "only as a mean or a sum, without smoothing")
    if target.is_floating_point():
        refuse("cross_entropy", "only of classes, not of their probabilities")
    rows, columns = x.whole.here
    if tuple(target.shape[-2:]) == x.whole.sizes:
        target = target[..., rows.start : rows.stop, columns.start : columns.stop]
    own = F.cross_entropy(plain(x), target, weight, ignore_index=ignore_index, reduction="sum")
    everyone = x.whole.ground.everyone
    if reduction == "sum":
        return ordinary(summed(own, everyone), x.whole)
    counted = target != ignore_index
    weights = counted.to(own.dtype) if weight is None else weight[target.where(counted, 0)] * counted
    count = weights.sum()
    dist.all_reduce(count, group=everyone)
    return ordinary(summed(own / count, everyone), x.whole)
