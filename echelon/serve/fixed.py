"""Matrix products whose rows do not depend on each other's number: the first half of the reproducible mode.

A library chooses how to sum by the shape of the whole product, so a token's result changes, in its last bits, with how
many others are in the step. Here every product is made in tiles of the same number of rows, the last one filled up: of
a fixed shape a row's result is the same in any place of it (`check` makes sure, for this machine and each shape).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 16


def fix(model: nn.Module) -> nn.Module:
    """Let all linear layers and the head of a model compute in tiles, in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(in_tiles, module.forward)  # type: ignore[method-assign]
    head: Any = model.get_submodule("head")
    project = head.project
    head.project = lambda hidden, weight, bias: in_tiles(lambda rows: project(rows, weight, bias), hidden)
    return model


def in_tiles(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    rows_ND = x.flatten(0, -2)
    short = -len(rows_ND) % ROWS
    tiles = F.pad(rows_ND, (0, 0, 0, short)).split(ROWS)
    out = torch.cat([product(tile) for tile in tiles])[: len(rows_ND)]
    return out.view(*x.shape[:-1], out.shape[-1])


@torch.no_grad()
def check(model: nn.Module) -> None:
    """Whether a row's product has the same bits in any place of a tile, for the shapes of this model."""
    seen = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or not isinstance(weight, Tensor) or tuple(weight.shape) in seen:
            continue
        seen.add(tuple(weight.shape))
        generator = torch.Generator().manual_seed(0)
        rows_ND = torch.randn(ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        expected = None
        for place in range(ROWS):
            moved = rows_ND.roll(place, 0)
            got = F.linear(moved, weight)[place]
            if expected is None:
                expected = got
            elif not torch.equal(got, expected):
                raise ValueError(
                    f"{name}: on this machine a row of a {[*weight.shape]} product changes with its place among "
                    f"{ROWS}, so answers cannot be reproducible: serve in fp32, or without --reproducible"
                )
