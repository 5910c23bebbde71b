"""Norms: their statistics are those of the whole image, and BatchNorm's of all images."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel import batchnorm
from echelon.parallel.spatial.exchange import summed
from echelon.parallel.spatial.operations import tiled
from echelon.parallel.spatial.tiles import Tile, plain


@tiled(F.batch_norm, torch.batch_norm)
def _batch_norm(
    x: Tile,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tile:
    local = plain(x)
    if not training:
        out = F.batch_norm(local, running_mean, running_var, weight, bias, False, eps=eps)
        return Tile.of(out, x.whole)
    out, mean_C, variance_C = batchnorm.normalize(local, weight, bias, eps, x.whole.ground.statistics)
    batchnorm.carry_on(running_mean, mean_C, momentum or 0.0)
    batchnorm.carry_on(running_var, variance_C, momentum or 0.0)
    return Tile.of(out, x.whole)


@tiled(F.group_norm, torch.group_norm)
def _group_norm(
    x: Tile, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Tile:
    out, _mean, _variance = _normed(x, num_groups, weight, bias, eps)
    return Tile.of(out, x.whole)


@tiled(F.instance_norm, torch.instance_norm)
def _instance_norm(
    x: Tile,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tile:
    local = plain(x)
    if not use_input_stats:
        out = F.instance_norm(local, running_mean, running_var, weight, bias, False, eps=eps)
        return Tile.of(out, x.whole)
    out, mean_BC, variance_BC = _normed(x, local.shape[1], weight, bias, eps)
    count = math.prod(x.whole.sizes)
    batchnorm.carry_on(running_mean, mean_BC.mean(0), momentum)
    batchnorm.carry_on(running_var, variance_BC.mean(0) * count / max(count - 1, 1), momentum)
    return Tile.of(out, x.whole)


def _normed(
    x: Tile, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By mean and variance of each sample's groups of channels, over the whole image; and these."""
    local, everyone = plain(x), x.whole.ground.everyone
    grouped = local.unflatten(1, (groups, -1)).flatten(2)
    if grouped.dtype in (torch.float16, torch.bfloat16):
        grouped = grouped.float()
    count = local.shape[1] // groups * math.prod(x.whole.sizes)
    mean = summed(grouped.sum(2), everyone) / count
    centred = grouped - mean.unsqueeze(2)
    variance = summed((centred * centred).sum(2), everyone) / count
    out = (centred * (variance + eps).rsqrt().unsqueeze(2)).view(local.shape)
    if weight is not None:
        out = out * weight[:, None, None]
    if bias is not None:
        out = out + bias[:, None, None]
    return out.to(local.dtype), mean.detach(), variance.detach()
