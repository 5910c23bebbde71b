"""How surprised a model is by a text: what quantization, or any other change, costs in quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_AT_ONCE = 4096  # tokens of a forward pass


@torch.no_grad()
def perplexity(model: Any, tokens: Sequence[int] | Tensor, length: int) -> float:
    """Of a text, read in pieces of `length` tokens, each without what came before it. Lower is better, 1 is best; a
    model that knows nothing has as much as its vocabulary has tokens.

    Ranks that share a model (`parallel.shards`) call this together, and all get the answer.
    """
    if len(tokens) < 2 or length < 1:
        raise ValueError(f"{len(tokens)} tokens in pieces of {length}: perplexity needs two tokens and pieces of one")
    text = torch.as_tensor(tokens, dtype=torch.int64).to(next(model.parameters()).device)
    whole = (len(text) - 1) // length * length
    inputs_PS, targets_PS = (text[first : first + whole].view(-1, length) for first in (0, 1))
    pieces = max(_AT_ONCE // length, 1)
    total = sum(_loss(model, *each) for each in zip(inputs_PS.split(pieces), targets_PS.split(pieces), strict=True))
    if whole < len(text) - 1:
        total += _loss(model, text[None, whole:-1], text[None, whole + 1 :])
    return math.exp(total / (len(text) - 1))


def _loss(model: Any, inputs_BS: Tensor, targets_BS: Tensor) -> float:
    return float(model(inputs_BS, targets_BS)) if inputs_BS.numel() else 0.0
