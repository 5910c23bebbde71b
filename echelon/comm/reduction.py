"""What a reduction means for a dtype: the one place where `ReduceOp` and dtypes meet.

A `Reduction` is an elementary operation, and what to multiply by before it and divide by after it. Booleans are
reduced as bytes of 0 and 1, complex sums as sums of their parts. Low-precision floats are never added in their own
precision: `algorithms` brings the pieces of all ranks together and adds them in fp32, rounding once.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

_NAMES = {
    hash(getattr(ReduceOp, name.upper())): name
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
}
_PREMUL_SUM = hash(ReduceOp.PREMUL_SUM)
_BITWISE = {"band", "bor", "bxor"}
_AS_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max", "band": "min", "bor": "max", "bxor": "bxor"}
LOW_PRECISION = frozenset(
    getattr(torch, name)
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)

HALF_PRECISION = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class Reduction:
    """`operation` over the ranks, of inputs seen as `view` (a dtype for their bytes), premultiplied or averaged."""

    operation: str
    view: torch.dtype | None = None
    average: bool = False
    factor: float | Tensor | None = None

    plain: bool = field(init=False)  # nothing but the operation: the common case, told apart cheaply

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.view is None and self.factor is None and not self.average)

    def of(self, tensor: Tensor) -> Tensor:
        """The same memory, in the dtype that is reduced."""
        if self.view is None:
            return tensor
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(self.view)


def resolve(op: ReduceOp, dtype: torch.dtype) -> Reduction:
    """The reduction that `op` asks for on `dtype`; a TypeError where the dtype has no such operation."""
    kind = hash(
        op
    )  # the operation's number, for both of PyTorch's ReduceOp types; comparing them costs ten times as much
    if kind != _PREMUL_SUM:
        return _resolve(kind, dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"PREMUL_SUM multiplies by a real factor, which {dtype} cannot hold: use a floating-point tensor"
        )
    plain = _resolve(hash(ReduceOp.SUM), dtype)
    state: Any = op.__getstate__()
    return Reduction(plain.operation, plain.view, factor=state[1])


@cache
def plain_operations(dtypes: frozenset[torch.dtype]) -> dict[tuple[int, torch.dtype], str]:
    """By `id(ReduceOp.…)` and dtype, the real reductions that are an elementary operation and nothing else."""
    plain = {}
    for dtype in dtypes:
        for kind, name in _NAMES.items():
            with contextlib.suppress(TypeError):  # which this dtype has not
                if kind != _PREMUL_SUM and not dtype.is_complex and (reduction := _resolve(kind, dtype)).plain:
                    plain[id(getattr(ReduceOp, name.upper())), dtype] = reduction.operation
    return plain


@cache
def _resolve(kind: int, dtype: torch.dtype) -> Reduction:
    name = _NAMES.get(kind)
    if name is None:
        raise TypeError(f"unknown reduction {kind}: Echelon knows {', '.join(n.upper() for n in _NAMES.values())}")
    real = dtype.is_floating_point
    if dtype == torch.bool:
        if name not in _AS_BOOL:
            raise TypeError(f"{name.upper()} of torch.bool has no meaning: use SUM (any), PRODUCT (all) or BXOR")
        return Reduction(_AS_BOOL[name], view=torch.uint8)
    if dtype.is_complex:
        if name in ("sum", "avg"):
            return Reduction("sum", view=dtype.to_real(), average=name == "avg")
        if name == "product" and dtype != torch.complex32:
            return Reduction("product")
        raise TypeError(f"{name.upper()} of {dtype} has no meaning: complex tensors have SUM, AVG and PRODUCT")
    if name in _BITWISE and real:
        raise TypeError(f"{name.upper()} is for integers and booleans, not {dtype}")
    if name == "avg":
        if not real:
            raise TypeError(
                f"AVG of {dtype} would not be exact: use SUM and divide, or average in a floating-point dtype"
            )
        return Reduction("sum", average=True)
    return Reduction(name)
