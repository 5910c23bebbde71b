"""What slides over an image: convolutions and poolings.

What a window sees is brought together by `slide`, and the plain operation computes the rest: so every kernel, stride,
dilation and padding is one case.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.spatial.cut import Window, bounds, within
from echelon.parallel.spatial.exchange import fetch
from echelon.parallel.spatial.operations import pair, tiled
from echelon.parallel.spatial.slide import nothing, slide
from echelon.parallel.spatial.tiles import AXES, Tile, plain


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
        return Tile.of(nothing(local, channels, parts, weight, bias), whole)
    if 0 in local.shape[2:]:  # nothing reaches these outputs
        out = nothing(local, channels, parts, weight, bias)
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
