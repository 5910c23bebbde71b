"""Weights in 8-bit integers, for activations that stay as they are.

A product with few rows waits for the weight, so it is widened where it is multiplied, in registers: on a GPU by
`kernels.thin`, on a CPU by a kernel of PyTorch's (fast in bf16 alone). Many rows are bound by arithmetic: one widening
for all of them is right, on a CPU to fp32 where it has no arithmetic in bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.serve.narrow import TINY, NarrowWeight, has_kernels, kernels

FEW, FEW_ON_CPU = 128, 32  # rows
VECTOR = 32  # features that PyTorch's kernel takes at once; it does not check whether the last ones are there
_LARGEST = 127


class Int8Weight(NarrowWeight):
    @classmethod
    def rounded(cls, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        scale_N1 = weight_NK.float().abs().amax(-1, keepdim=True).clamp_min(TINY) / _LARGEST
        return (weight_NK.float() / scale_N1).round().to(torch.int8), scale_N1

    def times(self, rows_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        dtype, (count, features) = rows_MK.dtype, rows_MK.shape
        if has_kernels(rows_MK) and dtype != torch.float32:
            if count <= FEW:
                return kernels.thin(rows_MK, None, self.data8_NK, self.scale_N1, bias_N, dtype)
            return F.linear(rows_MK, kernels.widen(self.data8_NK, self.scale_N1, dtype), bias_N)
        if rows_MK.is_cpu and dtype == torch.bfloat16:
            if 0 < count <= FEW_ON_CPU and features % VECTOR == 0:
                scale_N = self.scale_N1.flatten().to(dtype)
                out_MN: Tensor = torch._weight_int8pack_mm(rows_MK.contiguous(), self.data8_NK, scale_N)
                return out_MN if bias_N is None else out_MN + bias_N
            if not torch.cpu._is_avx512_bf16_supported():
                wide_bias_N = None if bias_N is None else bias_N.float()
                return F.linear(rows_MK.float(), self.data8_NK * self.scale_N1, wide_bias_N).to(dtype)
        return F.linear(rows_MK, (self.data8_NK * self.scale_N1).to(dtype), bias_N)
