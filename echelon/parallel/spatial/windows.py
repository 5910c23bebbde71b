"""What slides over an image: convolutions and poolings.

What a window sees of other tiles is fetched (exchange.py), what lies beyond the image is padded by hand, and the plain
operation computes the rest without padding. So every kernel, stride, dilation and padding is one case.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.spatial.cut import Window, beyond, bounds, within
from echelon.parallel.spatial.exchange import fetch
from echelon.parallel.spatial.operations import pair, tiled
from echelon.parallel.spatial.tiles import AXES, Tile, Whole, plain


def _seen(x: Tile, windows: tuple[Window, Window], fill: float) -> tuple[Tensor, Whole, tuple[range, range]]:
    """What the windows of this rank's outputs see, padded; what the outputs are a part of, and which are here."""
    whole = x.whole
    sizes = tuple(window.outputs(length) for window, length in zip(windows, whole.sizes, strict=True))
    out = whole.resized(*sizes)
    local = plain(x)
    pads: list[int] = []
    for axis, window in enumerate(windows):
        length, group = whole.sizes[axis], whole.ground.groups[axis]
        sees = window.sees(out.here[axis])
        if group is not None:
            parts = bounds(sizes[axis], group.size())
            wanted = tuple((within(window.sees(part), length),) for part in parts)
            local = fetch(local, AXES[axis], length, wanted, group)
        else:
            inside = within(sees, length)
            local = local.narrow(AXES[axis], inside.start, len(inside))
        pads = [*beyond(sees, length), *pads]
    if any(pads):
        local = F.pad(local, pads, value=fill)
    return local, out, out.here


def _is_empty(parts: tuple[range, range]) -> bool:
    return not all(parts)


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
    pads = [_padding(padding, axis, kernels[axis], dilations[axis]) for axis in range(2)]
    windows = tuple(Window(kernels[i], strides[i], *pads[i], dilations[i]) for i in range(2))
    seen, whole, parts = _seen(x, (windows[0], windows[1]), 0.0)
    if _is_empty(parts):
        return Tile.of(_nothing(seen, len(weight), parts, weight, bias), whole)
    return Tile.of(F.conv2d(seen, weight, bias, strides, 0, dilations, groups), whole)


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
    seen, whole, parts = _seen(x, windows, -math.inf)
    if _is_empty(parts):
        return Tile.of(_nothing(seen, seen.shape[1], parts), whole)
    return Tile.of(F.max_pool2d(seen, kernels, strides, 0, dilations), whole)


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
    seen, whole, parts = _seen(x, windows, 0.0)
    if _is_empty(parts):
        return Tile.of(_nothing(seen, seen.shape[1], parts), whole)
    sums = F.avg_pool2d(seen, kernels, strides, divisor_override=1)
    if divisor_override is not None:
        return Tile.of(sums / divisor_override, whole)
    counts = []
    for axis, window in enumerate(windows):
        length = x.whole.sizes[axis]
        low, high = (-window.before, length + window.after) if count_include_pad else (0, length)
        starts = [output * window.stride - window.before for output in parts[axis]]
        counts.append([min(start + window.kernel, high) - max(start, low) for start in starts])
    rows, columns = (torch.tensor(each, dtype=sums.dtype, device=sums.device) for each in counts)
    return Tile.of(sums / (rows[:, None] * columns), whole)


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
    local, cuts = plain(x), []
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
        cuts.append((own.start * strides[axis] - pads[axis], len(own)))
    parts = whole.here
    channels = weight.shape[1] * groups
    if _is_empty(parts):
        return Tile.of(_nothing(local, channels, parts, weight, bias), whole)
    if 0 in local.shape[2:]:  # nothing reaches these outputs
        out = _nothing(local, channels, parts, weight, bias)
        return Tile.of(out if bias is None else out + bias[:, None, None], whole)
    spread = F.conv_transpose2d(local, weight, None, strides, 0, 0, groups, dilations)
    for axis, (first, _) in enumerate(cuts):
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
