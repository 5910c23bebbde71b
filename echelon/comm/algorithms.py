"""Reductions that Echelon computes itself, from what any transport can move.

MPI adds neither bf16, fp16 nor fp8, and adding them step by step around a ring would round at every step. Here each
rank receives its own piece of everybody's tensor, adds the pieces in fp32 in the order of ranks, rounds once, and
(for an all-reduce) the finished pieces are gathered. Each rank sends (n−1)/n of the tensor in each phase, as a ring
does, and all ranks hold the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from echelon.comm.reduction import HALF_PRECISION, LOW_PRECISION

if TYPE_CHECKING:
    from echelon.comm.transports import Transport

_COMBINE: dict[str, tuple[Any, Any]] = {
    "sum": (torch.add, np.add),
    "product": (torch.mul, np.multiply),
    "min": (torch.minimum, np.minimum),
    "max": (torch.maximum, np.maximum),
    "band": (torch.bitwise_and, np.bitwise_and),
    "bor": (torch.bitwise_or, np.bitwise_or),
    "bxor": (torch.bitwise_xor, np.bitwise_xor),
}
WITH_NUMPY = {name: with_numpy for name, (_, with_numpy) in _COMBINE.items()}
_ONLY_NUMPY = (torch.uint16, torch.uint32, torch.uint64)  # PyTorch has these dtypes, but hardly any arithmetic for them
_BLOCK = 2**16  # elements reduced at a time, so that the fp32 sums stay in the cache
_DEVICE_BLOCK = 2**24  # on a device, where starting a kernel costs more
_ONE_STEP = 2**16  # bytes up to which two ranks exchange whole tensors


@torch.inference_mode()  # the numbers only: autograd has no part in communication
def accumulate(pieces: list[Tensor], operation: str, out: Tensor, divisor: int = 1) -> None:
    """Reduce `pieces`, one a rank, into `out` (which may be one of them), in fp32 or their own wider dtype."""
    pieces, out = [piece.detach() for piece in pieces], out.detach()
    if out.dtype in _ONLY_NUMPY and not out.is_cpu:
        on_host = out.cpu()
        accumulate([piece.cpu() for piece in pieces], operation, on_host, divisor)
        out.copy_(on_host)
        return
    wide = torch.float32 if out.dtype in LOW_PRECISION else out.dtype
    # Halves are computed in fp32 by PyTorch's own element-wise operations on the CPU.
    if len(pieces) == 2 and divisor == 1 and (out.dtype == wide or out.dtype in HALF_PRECISION):
        _combine(operation, pieces[0], pieces[1], out)
        return
    block = min(_BLOCK if out.is_cpu else _DEVICE_BLOCK, out.numel())
    if out.dtype == wide and divisor == 1 and len(pieces) > 2:
        _accumulate_in_place(pieces, operation, out, block)
        return
    total, widened = (torch.empty(block, dtype=wide, device=out.device) for _ in range(2))
    for start in range(0, out.numel(), max(block, 1)):
        target = out[start : start + block]
        total, widened = total[: len(target)], widened[: len(target)]
        total.copy_(pieces[0][start : start + block])
        for piece in pieces[1:]:
            widened.copy_(piece[start : start + block])
            _combine(operation, total, widened, total)
        if divisor != 1:
            total /= divisor
        target.copy_(total)


def _accumulate_in_place(pieces: list[Tensor], operation: str, out: Tensor, block: int) -> None:
    """Where nothing is widened: straight into `out`, unless that is a piece whose turn comes later."""
    aside = torch.empty_like(out[:block]) if any(piece.data_ptr() == out.data_ptr() for piece in pieces[2:]) else None
    for start in range(0, out.numel(), max(block, 1)):
        target = out[start : start + block]
        total = target if aside is None else aside[: len(target)]
        parts = [piece[start : start + block] for piece in pieces]
        _combine(operation, parts[0], parts[1], total)
        for part in parts[2:]:
            _combine(operation, total, part, total)
        if aside is not None:
            target.copy_(total)


def _combine(operation: str, left: Tensor, right: Tensor, out: Tensor) -> None:
    with_torch, with_numpy = _COMBINE[operation]
    if out.dtype in _ONLY_NUMPY:
        with_numpy(left.numpy(), right.numpy(), out=out.numpy())
    else:
        with_torch(left, right, out=out)


def reduce_scatter(
    transport: Transport, output: Tensor, inputs: list[Tensor], operation: str, divisor: int = 1
) -> None:
    """`inputs[rank]`, reduced over the ranks, into that rank's `output`."""
    received = [
        output.new_empty(output.shape) if rank != transport.rank else inputs[rank] for rank in range(transport.size)
    ]
    transport.exchange(
        [(rank, piece) for rank, piece in enumerate(inputs) if rank != transport.rank],
        [(rank, piece) for rank, piece in enumerate(received) if rank != transport.rank],
    )
    accumulate(received, operation, output, divisor)


def all_reduce(transport: Transport, tensor: Tensor, operation: str, divisor: int = 1) -> None:
    """Reduce flat `tensor` over all ranks, in place."""
    if (
        transport.size == 2 and tensor.nbytes <= _ONE_STEP
    ):  # exchanging the whole moves what a ring of two would, in one step
        theirs = torch.empty_like(tensor)
        other = 1 - transport.rank
        transport.exchange([(other, tensor)], [(other, theirs)])
        accumulate([tensor, theirs] if transport.rank == 0 else [theirs, tensor], operation, tensor, divisor)
        return
    pieces = list(torch.tensor_split(tensor, transport.size))
    mine = torch.empty_like(pieces[transport.rank])
    reduce_scatter(transport, mine, pieces, operation, divisor)
    transport.all_gather_uneven(tensor, mine, [len(piece) for piece in pieces])


def reduce(transport: Transport, tensor: Tensor, operation: str, root: int, divisor: int = 1) -> None:
    """Reduce flat `tensor` over all ranks into the root's; the other ranks' tensors keep their values."""
    pieces = list(torch.tensor_split(tensor, transport.size))
    mine = torch.empty_like(pieces[transport.rank])
    reduce_scatter(transport, mine, pieces, operation, divisor)
    transport.exchange([(root, mine)], list(enumerate(pieces)) if transport.rank == root else [])
