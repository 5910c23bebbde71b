"""Activation checkpointing: what a block computes is computed again in the backward pass instead of being kept.

`full` keeps only what goes into a block. `selective` also keeps what is dear to compute again, the products of
matrices, attention and what was communicated, and recomputes the rest: norms, activations, dropout. Dropout draws by
position, not from a generator, so that it drops the same again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def recompute(model: nn.Module, how: Recompute) -> nn.Module:
    """Recompute each of `model.blocks` in the backward pass, in place."""
    if how not in ("none", "selective", "full"):
        raise ValueError(f"recompute is none, selective or full, and not {how!r}")
    if how == "none":
        return model
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    for block in blocks(model):
        again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts)
        block.forward = again
    return model


def blocks(model: nn.Module) -> list[Any]:
    """What a deep model repeats."""
    found = getattr(model, "blocks", None)
    if not isinstance(found, nn.ModuleList):
        what = "it can be neither recomputed nor compiled, nor multiply in fp8"
        raise ValueError(f"{type(model).__name__} has no list `blocks`: {what}")
    return list(found)


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
