"""Products, norms and activations whose rows do not depend on each other's number: half of the reproducible mode.

A library chooses how to sum by the shape of the whole product, and computes the last few elements of an activation by
another formula: so a token's result changes, in its last bits, with how many others are in the step. Here all that is
done token by token is done in tiles of the same number of rows, the last one filled up. Of a fixed shape a row's result
is the same in any place; `fix` makes sure of it, on this machine and for this model. (attention.py has the other half.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16


@torch.inference_mode()
def fix(model: Any) -> None:
    """Let the model compute in tiles; ValueError if a row's bits would even then depend on its place."""
    for number, block in enumerate(model.blocks):
        parts = {
            "attention_norm": block.attention_norm,
            "qkv": block.attention.qkv,
            "out": block.attention.out,
            "mlp_norm": block.mlp_norm,
            "mlp": block.mlp,
        }
        if block.attention.q_norm is not None:
            parts |= {"q_norm": block.attention.q_norm, "k_norm": block.attention.k_norm}
        for name, part in parts.items():
            if not number:  # the others have the same shapes
                _check(name, part.forward, model)
            part.forward = partial(in_tiles, part.forward)
    _check("norm", model.norm.forward, model)
    _check("head", model.head, model)
    model.norm.forward = partial(in_tiles, model.norm.forward)
    project = model.head.project
    model.head.project = lambda hidden, weight, bias: in_tiles(lambda rows: project(rows, weight, bias), hidden)


def in_tiles(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    rows_ND = x.flatten(0, -2)
    tiles = F.pad(rows_ND, (0, 0, 0, -len(rows_ND) % ROWS)).split(ROWS)
    out = torch.cat([compute(tile) for tile in tiles])[: len(rows_ND)]
    return out.view(*x.shape[:-1], out.shape[-1])


def _check(name: str, compute: Callable[[Tensor], Tensor], model: Any) -> None:
    attention = model.blocks[0].attention
    widths = {"out": attention.out.weight.shape[1], "q_norm": attention.head_dim, "k_norm": attention.head_dim}
    width = widths.get(name, model.config.dim)
    like = model.norm.weight
    tile = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    results = [compute(tile.roll(place, 0))[place] for place in range(ROWS)]
    if not all(torch.equal(result, results[0]) for result in results):
        raise ValueError(
            f"on this machine a row of `{name}` changes with its place among {ROWS}, so answers cannot be "
            "reproducible: try fp32, another number of threads, or do without"
        )
