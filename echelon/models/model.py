"""What all models have: a config, a place that their dropouts share, and first values by seed and name.

A model may be built on the meta device, split, sharded, and only then given memory (`to_empty`) and values
(`initialize`, or `hub.load_into`): each rank makes only what it holds, and it is what a single process would have.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from echelon.models import counter, held
from echelon.models.chain import Linked
from echelon.models.dropout import Place, connect


class Model(Linked):
    """A subclass builds its parts and then calls `finish`.

    Its `forward` takes beside its arguments what the links before its span have `received` and passed on.
    """

    place: Place
    config: Any
    tied = False  # whether `head.weight` is `tokens.weight`

    def finish(self, config: Any) -> None:
        self.config, self.place = config, Place()
        self.tied = getattr(config, "tied", False)
        connect(self, self.place)
        self._tie()
        self.initialize()

    def deviation(self, name: str, parameter: Tensor) -> float:
        """Of a weight's first values. What is added to a stream that is not normed starts smaller, as in GPT-2, so
        that the stream's variance does not grow with the depth."""
        added = name.endswith(("out.weight", "down.weight"))
        return 0.02 / math.sqrt(2 * self.config.layers) if added else 0.02

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> None:
        """First values, which depend on nothing but the seed, the parameter's name and the place in the parameter."""
        for name, tensor in held.tensors(self):
            if tensor.is_meta:
                continue
            if name.endswith(("bias", "running_mean", "num_batches_tracked")):
                held.local(tensor).zero_()
            elif tensor.dim() == 1:
                held.local(tensor).fill_(1)
            else:
                _draw(tensor, counter.name_key(seed, name), self.deviation(name, tensor))

    def _apply(self, fn: Any, recurse: bool = True) -> Model:
        super()._apply(fn, recurse)
        self._tie()  # `to_empty` makes new parameters
        return self

    def _tie(self) -> None:
        if self.tied and hasattr(self, "head") and hasattr(self, "tokens"):
            self.get_submodule("head").weight = self.get_parameter("tokens.weight")


def _draw(tensor: Tensor, key: counter.Key, deviation: float) -> None:
    """This rank's part of a tensor, a few rows at a time: what is drawn is wider than what is kept."""
    (first, *others), mine = held.part(tensor), held.local(tensor)
    columns = _flat_columns(tuple(others), tuple(tensor.shape[1:]), mine.device)
    step = max(2**22 // max(len(columns), 1), 1)
    for start in range(first.start, first.stop, step):
        rows = torch.arange(start, min(start + step, first.stop), device=mine.device)
        drawn = counter.normal(key, counter.rows(key, rows), columns) * deviation
        piece = mine[start - first.start : start - first.start + len(rows)]
        piece.copy_(drawn.view(piece.shape))


def _flat_columns(ranges: tuple[slice, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers of a part's columns, in the whole tensor's own order of its dimensions after the first."""
    columns = torch.zeros(1, dtype=torch.int64, device=device)
    for size, held_range in zip(shape, ranges, strict=True):
        columns = (columns[:, None] * size + torch.arange(held_range.start, held_range.stop, device=device)).flatten()
    return columns
