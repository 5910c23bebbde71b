"""Weights in 8-bit floats (e4m3), and activations that are rounded to them as they come: PyTorch's scaled products.

Each row of what a weight is multiplied with (a token) has a scale of its own: what a token is rounded to depends on no
other. For few rows a kernel of our own (`kernels.thin`) multiplies the same numbers: PyTorch's libraries have tiles
made for many, and leave most of a GPU's processors without any. A CPU, which has no such arithmetic, multiplies them in
fp32, to try it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from echelon.serve.narrow import TINY, NarrowWeight, has_kernels, kernels

DTYPE = torch.float8_e4m3fn
MULTIPLE = 16  # of which both sides of a weight must be one
FEW = 32  # rows
_LARGEST = torch.finfo(DTYPE).max


class Fp8Weight(NarrowWeight):
    @classmethod
    def rounded(cls, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        return in_8_bits(weight_NK)

    def times(self, rows_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        rows8_MK, scale_M1 = in_8_bits(rows_MK)
        if has_kernels(rows_MK) and len(rows_MK) <= FEW:
            return kernels.thin(rows8_MK, scale_M1, self.data8_NK, self.scale_N1, bias_N, rows_MK.dtype)
        if rows_MK.is_cuda:
            product_MN: Tensor = F.scaled_mm(
                rows8_MK,
                self.data8_NK.T,
                scale_M1,
                ScalingType.RowWise,
                self.scale_N1.T,
                ScalingType.RowWise,
                output_dtype=torch.bfloat16,
            )
        else:
            product_MN = F.linear(rows8_MK.float() * scale_M1, self.data8_NK.float() * self.scale_N1)
        out_MN = product_MN.to(rows_MK.dtype)
        return out_MN if bias_N is None else out_MN + bias_N


def in_8_bits(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Each row over its own scale, and the scales (fp32)."""
    return kernels.in_8_bits(x_MK) if has_kernels(x_MK) else in_8_bits_plainly(x_MK)


def in_8_bits_plainly(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    scale_M1 = x_MK.float().abs().amax(-1, keepdim=True).clamp_min(TINY) / _LARGEST
    return (x_MK.float() / scale_M1).to(DTYPE), scale_M1
