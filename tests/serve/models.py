"""Small models whose next token is far from even (first values are too small for that); what stands in for a graph."""

from __future__ import annotations

from typing import Any

import torch

from echelon.models.presets import build

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"dim": 48, "layers": 2, "heads": 4},
    "llama3-8b": {"dim": 48, "layers": 2, "heads": 6, "kv_heads": 2, "mlp_dim": 80},
    "qwen2-0.5b": {"dim": 48, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_dim": 80},
    "qwen3-0.6b": {"dim": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp_dim": 80},
}


@torch.no_grad()
def small(name: str = "llama3-8b", **changes: Any) -> Any:
    model = build(name, **({"vocabulary": 256, "context": 128} | SHAPES[name] | changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
    return model


class Replayed:
    """In place of a graph: what would have been captured is computed anew, from where its input would lie."""

    used = 0

    def __init__(self, compute: Any, *_: Any) -> None:
        self._compute = compute

    def replay(self) -> Any:
        Replayed.used += 1
        return self._compute()
