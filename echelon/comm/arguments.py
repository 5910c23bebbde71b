"""What `torch.distributed` hands to a group, read and checked before anything is communicated.

PyTorch calls a method with an options object, with a shorter signature, with a tensor or with a list of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp


def read_options(kind: type, given: Any, **fields: Any) -> Any:
    """PyTorch's options: as given, or from the shorter signatures that take a root or a reduction in their place."""
    if type(given) is kind:
        return given
    options = kind()
    if isinstance(given, (ReduceOp, ReduceOp.RedOpType)):
        fields["reduceOp"] = given
    elif isinstance(given, int):
        fields["rootRank"] = given
    for field, value in fields.items():
        if value is not None:
            setattr(options, field, value)
    return options


def listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def listed_lists(tensors: Any) -> list[list[Tensor]]:
    return [tensors] if isinstance(tensors[0], Tensor) else tensors


def common_dtype(tensors: list[Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise ValueError(
            f"tensors reduced together must have one dtype, but these have {', '.join(sorted(map(str, dtypes)))}"
        )
    return dtypes.pop()


def check_list(name: str, tensors: list[Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"the {name} list needs one tensor for each of the {size} ranks, but has {len(tensors)}")


def check_multiple(name: str, whole: Tensor, part: Tensor, size: int) -> None:
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ValueError(
            f"the {name} must hold {size} × {part.numel()} elements of {part.dtype}, a part for each rank, "
            f"but holds {whole.numel()} of {whole.dtype}"
        )


def check_splits(name: str, tensor: Tensor, splits: list[int], size: int) -> None:
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits and (len(splits) != size or sum(splits) != rows):
        raise ValueError(
            f"the {name} splits {list(splits)} must be {size} numbers that add up to the {name}'s {rows} rows"
        )
    if not splits and rows % size:
        raise ValueError(f"the {name} has {rows} rows, which {size} ranks cannot share equally: give split sizes")
