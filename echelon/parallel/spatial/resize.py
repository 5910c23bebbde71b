"""Images that become larger or smaller: padding, slices, interpolation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.spatial.cut import beyond, bounds, within
from echelon.parallel.spatial.exchange import Wanted, fetch
from echelon.parallel.spatial.operations import pair, refuse, tiled
from echelon.parallel.spatial.tiles import AXES, Tile, plain


@tiled(F.pad, torch._C._nn.pad)
def _pad(x: Tile, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tile:
    pad = [*pad, 0, 0, 0, 0][: max(len(pad), 4)]
    local = plain(x)
    if any(pad[4:]):
        local = F.pad(local, [0, 0, 0, 0, *pad[4:]], mode, value)
    sizes = [length + pad[2 - 2 * axis] + pad[3 - 2 * axis] for axis, length in enumerate(x.whole.sizes)]
    whole = x.whole.resized(*sizes)
    pads: list[int] = []
    for axis, length in enumerate(x.whole.sizes):
        before, group = pad[2 - 2 * axis], whole.ground.groups[axis]
        if max(before, pad[3 - 2 * axis]) > _MOST[mode](length):
            refuse("pad", f"{mode} padding of {pad} for an image of {list(x.whole.sizes)}")
        parts = [range(sizes[axis])] if group is None else list(bounds(sizes[axis], group.size()))
        shifted = [range(part.start - before, part.stop - before) for part in parts]
        own = shifted[0 if group is None else group.rank()]
        if mode == "constant":
            wanted: Wanted = tuple((within(part, length),) for part in shifted)
            pads = [*beyond(own, length), *pads]
        else:
            wanted = tuple(_pieces(part, length, mode) for part in shifted)
        if group is not None:
            local = fetch(local, AXES[axis], length, wanted, group)
        elif mode == "constant":
            local = local.narrow(AXES[axis], wanted[0][0].start, len(wanted[0][0]))
        else:
            local = torch.cat([local.narrow(AXES[axis], piece.start, len(piece)) for piece in wanted[0]], AXES[axis])
    if any(pads):
        local = F.pad(local, pads, value=value or 0.0)
    return Tile.of(local, whole)


_MOST = {
    "constant": lambda length: math.inf,
    "reflect": lambda length: length - 1,
    "replicate": lambda length: math.inf if length else 0,
    "circular": lambda length: length,
}


@cache
def _pieces(part: range, length: int, mode: str) -> tuple[range, ...]:
    """The rows of a padded image, as rows of the image."""
    found: list[range] = []
    for row in part:
        if mode == "circular":
            at = row % length
        elif mode == "replicate":
            at = min(max(row, 0), length - 1)
        else:
            at = length - 1 - abs(length - 1 - abs(row))
        if found and found[-1].stop == at:
            found[-1] = range(found[-1].start, at + 1)
        else:
            found.append(range(at, at + 1))
    return tuple(found) or (range(0),)


@tiled(F.interpolate)
def _interpolate(
    x: Tile,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Each output is a sum of a few inputs, along one axis after the other."""
    if mode not in _TAPS or antialias:
        refuse("interpolate", f"by {mode}{' with antialias' if antialias else ''}: {', '.join(_TAPS)} can be")
    factors: Any = (None, None) if scale_factor is None else _factors(scale_factor)
    lengths = x.whole.sizes
    sizes = pair(size) if size is not None else tuple(int(lengths[axis] * factors[axis]) for axis in range(2))
    whole, local = x.whole.resized(*sizes), plain(x)
    for axis, length in enumerate(lengths):
        outputs, group = sizes[axis], whole.ground.groups[axis]
        if align_corners:
            scale = (length - 1) / (outputs - 1) if outputs > 1 else 0.0
        else:
            given = None if recompute_scale_factor else factors[axis]
            scale = length / outputs if given is None else 1 / given
        parts = [range(outputs)] if group is None else list(bounds(outputs, group.size()))
        taps = [[_TAPS[mode](at, scale, length, bool(align_corners)) for at in part] for part in parts]
        wanted = tuple((_covered([place for tap in each for place, _ in tap]),) for each in taps)
        me = 0 if group is None else group.rank()
        if group is not None:
            local = fetch(local, AXES[axis], length, wanted, group)
        else:
            local = local.narrow(AXES[axis], wanted[0][0].start, len(wanted[0][0]))
        local = _combined(local, AXES[axis], taps[me], wanted[me][0].start)
    return Tile.of(local, whole)


Tap = list[tuple[int, float]]  # the inputs of an output, and what each counts


def _factors(given: Any) -> tuple[float, float]:
    return (float(given), float(given)) if isinstance(given, int | float) else (float(given[0]), float(given[1]))


def _covered(places: list[int]) -> range:
    return range(min(places), max(places) + 1) if places else range(0)


def _combined(x: Tensor, dim: int, taps: list[Tap], first: int) -> Tensor:
    if not taps:
        return x.narrow(dim, 0, 0)
    out: Tensor | None = None
    shape = [-1 if each == dim else 1 for each in range(4)]
    for tap in zip(*taps, strict=True):
        places = torch.tensor([place - first for place, _ in tap], device=x.device)
        weights = torch.tensor([weight for _, weight in tap], dtype=x.dtype, device=x.device).view(shape)
        part = x.index_select(dim, places) * weights
        out = part if out is None else out + part
    assert out is not None
    return out


def _nearest(at: int, scale: float, length: int, _: bool) -> Tap:
    """In fp32, as PyTorch computes it for any image."""
    return [(min(math.floor(np.float32(at) * np.float32(scale)), length - 1), 1.0)]


def _nearest_exact(at: int, scale: float, length: int, _: bool) -> Tap:
    return [(min(math.floor(np.float32((at + 0.5) * float(np.float32(scale)))), length - 1), 1.0)]


def _linear(at: int, scale: float, length: int, aligned: bool) -> Tap:
    place = scale * at if aligned else max(scale * (at + 0.5) - 0.5, 0.0)
    low = min(math.floor(place), length - 1)
    part = min(max(place - low, 0.0), 1.0)
    return [(low, 1 - part), (min(low + 1, length - 1), part)]


def _cubic(at: int, scale: float, length: int, aligned: bool) -> Tap:
    place = scale * at if aligned else scale * (at + 0.5) - 0.5
    low, sharpness = math.floor(place), -0.75
    part = place - low

    def near(d: float) -> float:
        return ((sharpness + 2) * d - (sharpness + 3)) * d * d + 1

    def far(d: float) -> float:
        return ((sharpness * d - 5 * sharpness) * d + 8 * sharpness) * d - 4 * sharpness

    weights = far(part + 1), near(part), near(1 - part), far(2 - part)
    return [(min(max(low + step, 0), length - 1), weight) for step, weight in zip(range(-1, 3), weights, strict=True)]


_TAPS = {"nearest": _nearest, "nearest-exact": _nearest_exact, "bilinear": _linear, "bicubic": _cubic}


@tiled(Tensor.__getitem__)
def _getitem(x: Tile, index: Any) -> Tile:
    """Slices: of samples and channels any, of rows and columns without steps."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) > 4 or not all(isinstance(each, slice) for each in index):
        refuse("indexing", f"by {index}: only slices are")
    index = (*index, *[slice(None)] * (4 - len(index)))
    pads: list[int] = []
    for length, rows in zip(x.whole.sizes, index[2:], strict=True):
        start, stop, step = rows.indices(length)
        if step != 1:
            refuse("indexing", "in steps along a dimension that is cut")
        pads = [-start, max(stop, start) - length, *pads]
    return _pad(Tile.of(plain(x)[index[:2]], x.whole), pads)
