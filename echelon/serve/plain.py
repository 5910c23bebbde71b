"""The model as it is, over pages: its own forward pass with another attention, on any device.

The attention is put into a shell of the model, which has the same weights: so the model itself does not change, and
holds no cache when its engine is gone; several engines can have one model.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from echelon.parallel.tensor import kv_heads_of
from echelon.serve import fixed
from echelon.serve.attention import PagedAttention, plan
from echelon.serve.sample import Chosen, Draws, sample
from echelon.serve.step import Part, Shape


class Plain:
    """`reproducible`: see attention.py and fixed.py."""

    def __init__(self, model: Any, shape: Shape, reproducible: bool) -> None:
        self._model = _shell(model)
        self._page_size, self._reproducible = shape.page_size, reproducible
        self._device = next(model.parameters()).device
        self._table: list[list[int]] = [[] for _ in range(shape.rows)]
        self._layers = [
            PagedAttention(
                (shape.pages, shape.page_size, kv_heads_of(block.attention), block.attention.head_dim),
                model.norm.weight,
                reproducible,
            )
            for block in model.blocks
        ]
        for block, layer in zip(self._model.blocks, self._layers, strict=True):
            block.attention.attend = layer
        if reproducible:
            fixed.fix(self._model)

    def launch(self, parts: list[Part], draws: Draws | None) -> Chosen | None:
        """See `way.Way`."""
        logits_RV = self.compute(parts)
        if draws is None:
            return None
        return (
            sample(logits_RV, draws) if draws.each else Chosen(torch.empty(0, dtype=torch.int64, device=self._device))
        )

    def compute(self, parts: list[Part]) -> Tensor:
        """The logits after the last tokens of those parts that want them, in their order."""
        for part in parts:
            self._table[part.row][part.first_page :] = part.pages
        step = plan(parts, self._table, self._page_size, self._device, self._reproducible)
        for layer in self._layers:
            layer.step = step
        hidden_1TD = self._model(step.tokens_T.unsqueeze(0), positions_S=step.positions_T, hidden=True)
        if not len(step.last_R):
            return torch.empty(0, 0)
        logits_RV: Tensor = self._model.head(hidden_1TD[0, step.last_R])
        return logits_RV


def _shell(module: nn.Module) -> Any:
    """Modules of its own, with the same tensors."""
    own = copy(module)
    own._modules = {name: None if child is None else _shell(child) for name, child in module._modules.items()}
    return own
