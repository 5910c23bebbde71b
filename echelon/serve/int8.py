"""torchao's 8-bit weights, with a faster product where it has none. Imports torchao: to be imported when it is needed.

On CPUs, in bf16: for a few rows torchao widens the whole weight each time, which takes longer than a product with one
that was always wide. PyTorch has a kernel that widens in registers; it is fast in bf16 alone. Many rows are bound by
arithmetic, so one widening for all of them is right, but to fp32 where the CPU has no arithmetic in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8Tensor, PerRow, quantize_
from torchao.utils import should_reduce_range

FEW = 32  # rows
VECTOR = 32  # features that the kernel takes at once; it does not check whether the last ones are there


class Int8Weight(Int8Tensor):
    """A weight in 8 bits, with a scale for each of its rows, for activations that stay as they are."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is F.linear and arguments[0].is_cpu and arguments[0].dtype == torch.bfloat16:
            input, *others = arguments
            if _has_few_rows(input):
                return _multiply(input, *others, **(named or {}))
            if not torch.cpu._is_avx512_bf16_supported():
                wide = super().__torch_function__(function, types, (input.float(), *others), named)
                return wide.to(input.dtype)
        return super().__torch_function__(function, types, arguments, named)


def _has_few_rows(input: Tensor) -> bool:
    features = input.shape[-1]
    return features % VECTOR == 0 and 0 < input.numel() // features <= FEW


def _multiply(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    rows_ND = input.reshape(-1, input.shape[-1]).contiguous()
    out_NE = torch._weight_int8pack_mm(rows_ND, weight.qdata, weight.scale.flatten().to(input.dtype))
    if bias is not None:
        out_NE += bias
    return out_NE.view(*input.shape[:-1], -1)


def quantize_weight(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(Int8Weight.from_hp(linear.weight, granularity=PerRow()), requires_grad=False)


def quantize_both(linear: nn.Linear) -> None:
    """The weight now, and activations as they come; with a bit less where a CPU's sums could overflow."""
    narrower = should_reduce_range(linear.weight.device)
    quantize_(linear, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, reduce_range=narrower))
