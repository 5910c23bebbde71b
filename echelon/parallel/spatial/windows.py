"""What slides over an image: convolutions and poolings.

What a window sees of other tiles is fetched (exchange.py), what lies beyond the image is padded by hand, and the plain
operation computes the rest. So every kernel, stride, dilation and padding is one case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.spatial.cut import Window, beyond, bounds, rows, within
from echelon.parallel.spatial.exchange import arrived, began, fetch
from echelon.parallel.spatial.operations import pair, tiled
from echelon.parallel.spatial.tiles import AXES, Tile, Whole, plain

Compute = Callable[[Tensor, tuple[range, range], list[int]], Tensor]


def slide(
    x: Tile, windows: tuple[Window, Window], fill: float, channels: int, compute: Compute, *needed: Tensor | None
) -> Tile:
    """Let windows slide: `compute` has what they see, of which outputs that is, and padding that is left to it.

    Along the last axis that is cut the outputs that need nothing from others are computed while the rest travels, from
    the tile as it is: so neither it nor its padding is copied, or kept twice for the backward pass.
    """
    ground = x.whole.ground
    whole = x.whole.resized(*(window.outputs(size) for window, size in zip(windows, x.whole.sizes, strict=True)))
    last = 1 if ground.groups[1] is not None else 0
    local, pads, padding = _across(x, whole, windows, 1 - last)
    window, length, dim = windows[last], x.whole.sizes[last], AXES[last]
    group, own, parts = ground.groups[last], x.whole.here[last], whole.here
    tiles = ground.tiles(last)
    pieces = [
        _pieces(window, *each) for each in zip(bounds(whole.sizes[last], tiles), bounds(length, tiles), strict=True)
    ]
    wanted = tuple((within(window.sees(top), length), within(window.sees(bottom), length)) for top, _, bottom in pieces)
    top, inner, bottom = pieces[0 if group is None else group.rank()]
    journey = None
    if group is not None and parts[1 - last] and any(rows(each) for each in wanted):
        local, token, journey = began(local, dim, length, wanted, group)
    if not all(parts):
        if journey is not None:
            journey.receive()
        return Tile.of(_nothing(local, channels, parts, *needed), whole)

    def computed(seen: Tensor, outputs: range, ends: tuple[int, int]) -> Tensor:
        by_hand = [*pads, *ends] if last == 0 else [*ends, *pads]
        if any(by_hand):
            seen = F.pad(seen, by_hand, value=fill)
        return compute(seen, (outputs, parts[1]) if last == 0 else (parts[0], outputs), padding)

    found = {}
    if inner:
        seen = window.sees(inner)
        part = local if len(seen) == len(own) else local.narrow(dim, seen.start - own.start, len(seen))
        found[inner] = computed(part, inner, (0, 0))
    if top or bottom:
        here = wanted[0 if group is None else group.rank()]
        if journey is not None:
            slabs = arrived(local, token, journey)
        else:  # all of it is here, or none is anywhere
            slabs = tuple(local.narrow(dim, min(each.start, len(own)), len(each)) for each in here)
        for outputs, slab in zip((top, bottom), slabs, strict=True):
            if outputs:
                found[outputs] = computed(slab, outputs, beyond(window.sees(outputs), length))
    elif journey is not None:
        journey.receive()  # nothing, but what was sent has to arrive
    several = [found[each] for each in (top, inner, bottom) if each]
    return Tile.of(several[0] if len(several) == 1 else torch.cat(several, dim), whole)


def _across(x: Tile, whole: Whole, windows: tuple[Window, Window], axis: int) -> tuple[Tensor, list[int], list[int]]:
    """What is seen along the other axis, the padding that it needs by hand, and that which can be left to others."""
    window, length, group = windows[axis], x.whole.sizes[axis], x.whole.ground.groups[axis]
    local, padding = plain(x), [0, 0]
    if group is None and window.before == window.after and not window.ceil:
        padding[axis] = window.before
        return local, [0, 0], padding
    sees = window.sees(whole.here[axis])
    if group is None:
        inside = within(sees, length)
        local = local.narrow(AXES[axis], inside.start, len(inside))
    else:
        parts = bounds(whole.sizes[axis], group.size())
        local = fetch(local, AXES[axis], length, tuple((within(window.sees(part), length),) for part in parts), group)
    return local, [*beyond(sees, length)], padding


def _pieces(window: Window, part: range, held: range) -> tuple[range, range, range]:
    """Of a tile's outputs: the first, those whose windows see nothing but this tile, and the last."""
    reach = window.dilation * (window.kernel - 1)
    low = -(-(held.start + window.before) // window.stride)
    high = (held.stop - 1 - reach + window.before) // window.stride + 1
    low = min(max(low, part.start), part.stop)
    high = min(max(high, low), part.stop)
    return range(part.start, low), range(low, high), range(high, part.stop)


def _nothing(x: Tensor, channels: int, parts: tuple[range, range], *needed: Tensor | None) -> Tensor:
    """Where no output is: so that who holds none takes part in the backward pass."""
    out = x.new_zeros(len(x), channels, *(len(part) for part in parts))
    for each in (x, *needed):
        if each is not None:
            out = out + each.sum() * 0
    return out


@tiled(F.conv2d, torch.conv2d)
def _conv2d(
    x: Tile,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tile:
    kernels, strides, dilations = tuple(weight.shape[2:]), pair(stride), pair(dilation)
    ends = [_padding(padding, axis, kernels[axis], dilations[axis]) for axis in range(2)]
    first, second = (Window(kernels[i], strides[i], *ends[i], dilations[i]) for i in range(2))

    def compute(seen: Tensor, parts: tuple[range, range], padding: list[int]) -> Tensor:
        return F.conv2d(seen, weight, bias, strides, padding, dilations, groups)

    return slide(x, (first, second), 0.0, len(weight), compute, weight, bias)


def _padding(padding: Any, axis: int, kernel: int, dilation: int) -> tuple[int, int]:
    if padding == "valid":
        return 0, 0
    if padding == "same":
        both = dilation * (kernel - 1)
        return both // 2, both - both // 2
    return (pair(padding)[axis],) * 2


@tiled(F.max_pool2d, torch.max_pool2d)
def _max_pool2d(
    x: Tile,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,  # with it, it is another function
) -> Tile:
    kernels, strides, dilations = pair(kernel_size), pair(stride or kernel_size), pair(dilation)
    windows = _pools(kernels, strides, pair(padding), dilations, ceil_mode)

    def compute(seen: Tensor, parts: tuple[range, range], padding: list[int]) -> Tensor:
        return F.max_pool2d(seen, kernels, strides, padding, dilations)

    return slide(x, windows, -math.inf, plain(x).shape[1], compute)


@tiled(F.avg_pool2d, torch._C._nn.avg_pool2d)
def _avg_pool2d(
    x: Tile,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tile:
    kernels, strides, pads = pair(kernel_size), pair(stride or kernel_size), pair(padding)
    windows = _pools(kernels, strides, pads, (1, 1), ceil_mode)

    def counts(axis: int, outputs: range) -> list[int]:
        """How many rows count in each window."""
        window, length = windows[axis], x.whole.sizes[axis]
        low, high = (-window.before, length + window.after) if count_include_pad else (0, length)
        starts = [output * window.stride - window.before for output in outputs]
        return [min(start + window.kernel, high) - max(start, low) for start in starts]

    def compute(seen: Tensor, parts: tuple[range, range], padding: list[int]) -> Tensor:
        sums = F.avg_pool2d(seen, kernels, strides, padding, divisor_override=1)
        if divisor_override is not None:
            return sums / divisor_override
        height, width = (torch.tensor(counts(axis, part)).to(sums) for axis, part in enumerate(parts))
        return sums / (height[:, None] * width)

    return slide(x, windows, 0.0, plain(x).shape[1], compute)


def _pools(
    kernels: tuple[int, int], strides: tuple[int, int], pads: tuple[int, int], dilations: tuple[int, int], ceil: bool
) -> tuple[Window, Window]:
    first, second = (Window(kernels[i], strides[i], pads[i], pads[i], dilations[i], ceil) for i in range(2))
    return first, second


@tiled(F.conv_transpose2d, torch.conv_transpose2d)
def _conv_transpose2d(
    x: Tile,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tile:
    """Each output row is a sum over the input rows that reach it: these are fetched, spread out, and what the first of
    them adds before this rank's outputs is cut off.
    """
    kernels, strides, dilations = tuple(weight.shape[2:]), pair(stride), pair(dilation)
    pads, extras = pair(padding), pair(output_padding)
    reach = [dilations[i] * (kernels[i] - 1) for i in range(2)]
    sizes = [(x.whole.sizes[i] - 1) * strides[i] - 2 * pads[i] + reach[i] + extras[i] + 1 for i in range(2)]
    whole = x.whole.resized(*sizes)
    local, firsts = plain(x), []
    for axis in range(2):
        length, group = x.whole.sizes[axis], whole.ground.groups[axis]

        def sees(part: range, axis: int = axis, length: int = length) -> range:
            if not part:
                return range(0)
            first = -(-(part.start + pads[axis] - reach[axis]) // strides[axis])
            return within(range(first, (part.stop - 1 + pads[axis]) // strides[axis] + 1), length)

        own = sees(whole.here[axis])
        if group is not None:
            wanted = tuple((sees(part),) for part in bounds(sizes[axis], group.size()))
            local = fetch(local, AXES[axis], length, wanted, group)
        else:
            local = local.narrow(AXES[axis], own.start, len(own))
        firsts.append(own.start * strides[axis] - pads[axis])
    parts = whole.here
    channels = weight.shape[1] * groups
    if not all(parts):
        return Tile.of(_nothing(local, channels, parts, weight, bias), whole)
    if 0 in local.shape[2:]:  # nothing reaches these outputs
        out = _nothing(local, channels, parts, weight, bias)
        return Tile.of(out if bias is None else out + bias[:, None, None], whole)
    spread = F.conv_transpose2d(local, weight, None, strides, 0, 0, groups, dilations)
    for axis, first in enumerate(firsts):
        part = parts[axis]
        before, has = part.start - first, spread.shape[AXES[axis]]
        skipped = min(max(before, 0), has)
        kept = min(has - skipped, len(part) - max(-before, 0))
        spread = spread.narrow(AXES[axis], skipped, kept)
        ahead = max(-before, 0)
        pad = (ahead, len(part) - ahead - kept)
        if any(pad):
            spread = F.pad(spread, pad if axis == 1 else (0, 0, *pad))
    return Tile.of(spread if bias is None else spread + bias[:, None, None], whole)
