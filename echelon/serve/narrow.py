"""A weight in 8 bits, with a scale for each of its rows (an output feature): a tensor that knows how to be multiplied.

Models, and the split ones of `parallel.shards`, use it as they use any other weight. What its 8 bits are, and how it is
multiplied, its kinds know: int8.py, fp8.py.
"""

from __future__ import annotations

from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from echelon.serve import kernels
except ImportError:  # PyTorch for CPUs comes without Triton
    kernels = None  # type: ignore[assignment]

__all__ = ["TINY", "NarrowWeight", "has_kernels", "kernels"]

TINY = torch.finfo(torch.float32).tiny * 2**32  # the largest value of a row that has nothing but zeros


class NarrowWeight(Tensor):
    """`data8` times `scale`; to others it has the dtype of what it was made from."""

    tensor_data_names = ("data8_NK", "scale_N1")
    optional_tensor_data_names = ()
    data8_NK: Tensor
    scale_N1: Tensor

    @classmethod
    def made(cls, data8_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Self:
        weight: Any = Tensor._make_wrapper_subclass(cls, data8_NK.shape, dtype=dtype, device=data8_NK.device)
        weight.data8_NK, weight.scale_N1 = data8_NK, scale_N1
        return cast(Self, weight)

    @classmethod
    def rounded(cls, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """A weight in 8 bits, and its scales."""
        raise NotImplementedError

    def times(self, rows_MK: Tensor, bias_N: Tensor | None) -> Tensor:
        """What `F.linear` would return, in the dtype of `rows`."""
        raise NotImplementedError

    @classmethod
    def quantize(cls, linear: nn.Linear) -> None:
        with torch.cuda.device_of(linear.weight):
            weight = cls.made(*cls.rounded(linear.weight.detach()), linear.weight.dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is F.linear:
            return _linear(*arguments, **(named or {}))
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
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"


def has_kernels(x: Tensor) -> bool:
    return kernels is not None and x.is_cuda


def _linear(input: Tensor, weight: NarrowWeight, bias: Tensor | None = None) -> Tensor:
    with torch.cuda.device_of(input):  # on which Triton launches
        return weight.times(input.flatten(0, -2), bias).view(*input.shape[:-1], -1)
