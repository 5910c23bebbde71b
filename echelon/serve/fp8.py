"""Weights in 8-bit floats (e4m3), and activations that are rounded to them as they come: PyTorch's scaled products.

Each row of a weight (an output feature) has a scale of its own, and so has each row of what it is multiplied with (a
token): what a token is rounded to depends on no other. A weight is a tensor that knows how to be multiplied, so models
and the split ones of `parallel.shards` use it as they use any other.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

try:
    from echelon.serve import kernels
except ImportError:  # PyTorch for CPUs comes without Triton
    kernels = None  # type: ignore[assignment]

DTYPE = torch.float8_e4m3fn
MULTIPLE = 16  # of which both sides of a weight must be one
_LARGEST = torch.finfo(DTYPE).max
_TINY = torch.finfo(torch.float32).tiny * 2**32  # a scale of rows that are nothing but zeros


class Fp8Weight(Tensor):
    """`data8` over `scale`, a row of the weight each; to others it has the dtype of what it was made from."""

    tensor_data_names = ("data8_NK", "scale_N1")
    optional_tensor_data_names = ()
    data8_NK: Tensor
    scale_N1: Tensor

    @classmethod
    def made(cls, data8_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Fp8Weight:
        weight: Any = Tensor._make_wrapper_subclass(cls, data8_NK.shape, dtype=dtype, device=data8_NK.device)
        weight.data8_NK, weight.scale_N1 = data8_NK, scale_N1
        return cast(Fp8Weight, weight)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is F.linear:
            return _multiply(*arguments, **(named or {}))
        return super().__torch_function__(function, types, arguments, named or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if operation is torch.ops.aten.detach.default:  # as a parameter is made
            weight = arguments[0]
            return cls.made(weight.data8_NK, weight.scale_N1, weight.dtype)
        raise NotImplementedError(f"a weight in 8 bits is for products alone, and not for {operation}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp8Weight({list(self.shape)}, {self.dtype}, {self.device})"


def quantize_weight(linear: nn.Linear) -> None:
    weight = Fp8Weight.made(*in_8_bits(linear.weight.detach()), linear.weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)


def in_8_bits(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Each row over its own scale, and the scales (fp32)."""
    if kernels is not None and x_MK.is_cuda:
        return kernels.in_8_bits(x_MK)
    return in_8_bits_plainly(x_MK)


def in_8_bits_plainly(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    scale_M1 = x_MK.float().abs().amax(-1, keepdim=True).clamp_min(_TINY) / _LARGEST
    return (x_MK.float() / scale_M1).to(DTYPE), scale_M1


def _multiply(input: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    rows_MK, scale_M1 = in_8_bits(input.flatten(0, -2))
    out_MN: Tensor = F.scaled_mm(
        rows_MK,
        weight.data8_NK.T,
        scale_M1,
        ScalingType.RowWise,
        weight.scale_N1.T,
        ScalingType.RowWise,
        output_dtype=torch.bfloat16,
    )
    out = out_MN.view(*input.shape[:-1], -1).to(input.dtype)
    return out if bias is None else out + bias
