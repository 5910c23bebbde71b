"""The floating-point operations that training on one sample takes, counted on the plain model itself.

PyTorch's counter looks at the products of matrices and the convolutions of one forward pass; on the meta device that
costs neither memory nor arithmetic. Backward takes twice as many: a product for the gradient of each of its two
factors. This is how MFU is defined (PaLM, appendix B): attention counts whole, causal or not, and what recomputation
does again does not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

BACKWARD = 2  # times the forward pass


def training_flops(model: nn.Module, *, length: int = 0, image: int = 0) -> int:
    """Of one sample, forward and backward: a sequence of `length` tokens, or an image of so many pixels a side."""
    return (1 + BACKWARD) * forward_flops(model, length=length, image=image)


def forward_flops(model: nn.Module, *, length: int = 0, image: int = 0) -> int:
    """Of one sample. The model is a plain one on the meta device."""
    meta = torch.device("meta")
    if hasattr(model, "tokens"):
        sample = torch.zeros(1, length, dtype=torch.int64, device=meta)
    else:
        config: Any = model.config
        sample = torch.zeros(1, config.channels, image, image, device=meta, dtype=next(model.parameters()).dtype)
    was_training = model.training
    model.eval()  # dropout multiplies no matrices
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(sample)
    finally:
        model.train(was_training)
    return int(counter.get_total_flops())
