"""What every rank can compute alone: the input of each rank, and the result of each reduction, exactly, in one process.

Values are small whole numbers, so that every dtype, fp8 included, holds all sums and products of up to eight ranks
without rounding.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.distributed import ReduceOp

FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX, "bool")


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The input of `rank`: 0, 1 and 2 (1 and 2 are rare enough that no product grows past 16)."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    whole = torch.randint(0, 3, (count,), generator=generator)
    if dtype.is_complex:
        return torch.complex(whole.double(), torch.randint(0, 2, (count,), generator=generator).double()).to(dtype)
    return whole.to(dtype) if dtype != torch.bool else whole > 0


def _wide(tensor: Tensor) -> Tensor:
    """Where nothing rounds and every operation exists."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.dtype.is_floating_point else tensor.to(torch.int64)


_COMBINE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(tensors: list[Tensor], op: str) -> Tensor:
    """`tensors` of all ranks, reduced in one process."""
    dtype = tensors[0].dtype
    total = reduce(_COMBINE[op], [_wide(tensor) for tensor in tensors])
    if op == "AVG":
        total = (
            torch.view_as_complex(torch.view_as_real(total) / len(tensors))
            if dtype.is_complex
            else total / len(tensors)
        )
    return total > 0 if dtype == torch.bool else total.to(dtype)


def operations_of(name: str) -> tuple[str, ...]:
    """The reductions that a dtype has."""
    if name in COMPLEX:
        return ("SUM", "AVG")  # PyTorch's own front end refuses PRODUCT of complex tensors
    if name in FLOATS:
        return ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def op_of(name: str) -> ReduceOp.RedOpType:
    return getattr(ReduceOp, name)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal to the last bit, in shape and dtype too; zeros of either sign are one."""
    assert actual.dtype == expected.dtype, f"{actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    actual, expected = actual.cpu(), expected.cpu()
    if not torch.equal(_wide(actual), _wide(expected)):
        raise AssertionError(f"got {_wide(actual).flatten()[:16]}, expected {_wide(expected).flatten()[:16]}")
