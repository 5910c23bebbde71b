"""The optimizer of a training run: fused AdamW or SGD over this rank's pieces, with weight decay for matrices alone.

Which parameters decay is decided by the parameter's own number of dimensions, and the groups are formed by name: a
piece of a matrix may be flat, or empty, and yet ranks and stages must agree on the groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from echelon.parallel import optimizer as parallel
from echelon.train import config

Pieces = Iterable[tuple[str, Tensor]]  # by their parameters' names


def make_optimizer(model: nn.Module, settings: config.Optimizer) -> parallel.Optimizer:
    """For a parallelized model. The learning rate is the peak: a schedule sets `lr` in `inner.param_groups`."""
    decaying = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    return parallel.Optimizer(partial(_make, settings, decaying), model, on_cpu=settings.on_cpu)


def _make(settings: config.Optimizer, decaying: set[str], pieces: Pieces) -> torch.optim.Optimizer:
    named = list(pieces)
    groups = [
        {"params": [pair for pair in named if (pair[0] in decaying) is decays], "weight_decay": decay}
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    groups = [group for group in groups if group["params"]]
    if settings.kind == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=True)
