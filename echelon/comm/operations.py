"""What each operation of the process group does to tensors, in terms of a transport.

Transports take contiguous tensors; whatever is not contiguous is copied before and after. Lists and uneven splits
become one exchange of parcels, straight from and into the caller's tensors. All ranks must take the same way through
a function, so every choice made here depends only on what all ranks know alike: the operation, sizes, dtype and
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from echelon.comm import algorithms
from echelon.comm.reduction import LOW_PRECISION, Reduction
from echelon.comm.transports import Transport, copy_memory

# Bytes up to which a list is gathered as one tensor and copied, then straight into the list's tensors: where the one
# becomes faster than the other, with MPICH and with Open MPI (benchmarks/collectives.py).
_FLAT_GATHER = 2**16

# Which argument is an operation's payload, if not the first, and whether it is one rank's part of it.
_PAYLOAD = {
    "reduce_scatter": (1, False),
    "reduce_scatter_single": (1, False),
    "all_to_all": (1, False),
    "all_to_all_single": (1, False),
    "gather": (1, True),
    "scatter": (0, True),
}


# What tables of routes call an operation, if not by its own name.
_ROUTED = {
    "all_reduce_coalesced": "all_reduce",
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all": "all_to_all_v",  # lists may differ in size from rank to rank
}


@dataclass(slots=True)
class Call:
    """An operation and what it is done to: for the lane to run, and for those who ask what that was."""

    operation: Callable[..., None]
    arguments: tuple[Any, ...]
    tensors: list[Tensor] = field(init=False)  # all there are among the arguments and in their lists

    def __post_init__(self) -> None:
        self.tensors = [tensor for argument in self.arguments for tensor in _flat(argument)]

    @property
    def name(self) -> str:
        inner = self.arguments[0] if self.operation is one_after_another else self.operation
        return str(inner.__name__)

    @property
    def inputs(self) -> list[Tensor]:
        """What goes in: the last of the arguments that is a tensor or a list of them."""
        lists = [argument if type(argument) is list else [argument] for argument in self.arguments]
        return next((items for items in reversed(lists) if items and isinstance(items[0], Tensor)), [])

    def payload(self, size: int) -> int:
        """Bytes, as `recorder` defines them; `size` is the group's."""
        several = self.operation is one_after_another
        operation, *arguments = self.arguments if several else (self.operation, *self.arguments)
        which, part = _PAYLOAD.get(operation.__name__, (0, False))
        return sum(tensor.nbytes for tensor in _flat(arguments[which])) * (size if part else 1)

    @property
    def routed(self) -> str:
        """The operation, as `routes` knows it."""
        if self.operation is all_to_all_single:
            return "all_to_all_v" if self.arguments[2] or self.arguments[3] else "all_to_all"
        name = self.name
        return _ROUTED.get(name, name)

    @property
    def dtype(self) -> torch.dtype | None:
        return self.tensors[0].dtype if self.tensors else None

    @property
    def elements(self) -> int:
        """Of the first tensor: others differ in size, if at all, not in kind."""
        return self.tensors[0].numel() if self.tensors else 0


def all_reduce(transport: Transport, tensor: Tensor, reduction: Reduction) -> None:
    if tensor.is_sparse:
        all_reduce_sparse(transport, tensor, reduction)
        return
    if not tensor.is_contiguous():
        copy = tensor.detach().contiguous()
        all_reduce(transport, copy, reduction)
        copy_memory(tensor, copy)
        return
    flat = tensor if reduction.plain else _prepared(tensor, reduction)
    if flat.dtype in transport.reducible and not _divided_before_rounding(transport, reduction, flat.dtype):
        transport.all_reduce(flat, reduction.operation)
        if reduction.average:
            _divide(flat, transport.size)
    else:
        algorithms.all_reduce(transport, flat.view(-1), reduction.operation, _divisor(transport, reduction))


def all_reduce_sparse(transport: Transport, tensor: Tensor, reduction: Reduction) -> None:
    """The ranks' indices and values, as many as each has, are gathered, and added where they meet."""
    if reduction.operation != "sum" or reduction.factor is not None:
        raise TypeError("sparse tensors have only SUM and AVG: use `to_dense` for other reductions")
    # The result becomes a part of the caller's tensor: it must not be an inference tensor where that is none.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        mine = tensor.coalesce()
        counts = torch.empty(transport.size, dtype=torch.int64)
        transport.all_gather(counts, torch.tensor([mine._nnz()]))
        indices = _gather_rows(transport, mine.indices().t().contiguous(), counts.tolist())
        values = _gather_rows(transport, mine.values(), counts.tolist())
        wide = values.float() if values.dtype in LOW_PRECISION else values
        total = torch.sparse_coo_tensor(indices.t(), wide, tensor.shape).coalesce()
        if reduction.average:
            total /= transport.size
        tensor.copy_(total.to(tensor.dtype))


def _gather_rows(transport: Transport, rows: Tensor, counts: list[int]) -> Tensor:
    """All ranks' rows, of which rank `r` has `counts[r]`."""
    gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
    width = rows.shape[1:].numel()
    transport.all_gather_uneven(gathered, rows.contiguous(), [count * width for count in counts])
    return gathered


def all_reduce_coalesced(transport: Transport, tensors: list[Tensor], reduction: Reduction) -> None:
    flat = _flatten_dense_tensors([tensor.detach() for tensor in tensors])
    all_reduce(transport, flat, reduction)
    for tensor, result in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
        copy_memory(tensor, result)


def reduce(transport: Transport, tensor: Tensor, root: int, reduction: Reduction) -> None:
    work = tensor.detach()
    if not tensor.is_contiguous() or (reduction.factor is not None and transport.rank != root):
        work = work.clone(memory_format=torch.contiguous_format)
    flat = _prepared(work, reduction)
    if flat.dtype in transport.reducible:
        transport.reduce(flat, reduction.operation, root)
        if reduction.average and transport.rank == root:
            _divide(flat, transport.size)
    else:
        algorithms.reduce(transport, flat.view(-1), reduction.operation, root, _divisor(transport, reduction))
    if transport.rank == root:
        _give_back(tensor, work)


def broadcast(transport: Transport, tensor: Tensor, root: int) -> None:
    dense = _dense(tensor)
    transport.broadcast(dense, root)
    _give_back(tensor, dense)


def all_gather_single(transport: Transport, output: Tensor, input: Tensor) -> None:
    dense = _dense(output)
    in_place = input.data_ptr() == dense.data_ptr() + transport.rank * input.nbytes  # as FSDP2 does
    transport.all_gather(dense, _dense(input) if in_place else _apart(input, dense))
    _give_back(output, dense)


def all_gather(transport: Transport, outputs: list[Tensor], input: Tensor) -> None:
    """Tensors may differ in size from rank to rank, as long as all ranks expect the same sizes."""
    mine = _dense(input)
    equal = len({output.numel() for output in outputs}) == 1
    if equal and (transport.algorithm or mine.nbytes * transport.size <= _FLAT_GATHER):
        flat = mine.new_empty((transport.size, mine.numel()))
        transport.all_gather(flat, mine)
        for output, part in zip(outputs, flat, strict=True):
            copy_memory(output, part.view(output.shape))
        return
    dense = [_dense(output) for output in outputs]
    transport.exchange([(rank, mine) for rank in range(transport.size)], list(enumerate(dense)))
    _give_all_back(outputs, dense)


def gather(transport: Transport, outputs: list[Tensor] | None, input: Tensor, root: int) -> None:
    dense = [_dense(output) for output in outputs] if outputs else []
    transport.exchange([(root, _dense(input))], list(enumerate(dense)))
    _give_all_back(outputs or [], dense)


def scatter(transport: Transport, output: Tensor, inputs: list[Tensor] | None, root: int) -> None:
    dense = _dense(output)
    transport.exchange([(rank, _dense(tensor)) for rank, tensor in enumerate(inputs or [])], [(root, dense)])
    _give_back(output, dense)


def reduce_scatter_single(transport: Transport, output: Tensor, input: Tensor, reduction: Reduction) -> None:
    dtype = reduction.view or input.dtype
    here = reduction.factor is not None or _divided_before_rounding(transport, reduction, dtype)
    if dtype in transport.reducible and not here:
        dense = _dense(output)
        target = reduction.of(dense)
        transport.reduce_scatter(target, reduction.of(_apart(input, dense)), reduction.operation)
        if reduction.average:
            _divide(target, transport.size)
        _give_back(output, dense)
    else:
        reduce_scatter_pieces(
            transport, output, list(torch.tensor_split(_dense(input).view(-1), transport.size)), reduction
        )


def reduce_scatter(transport: Transport, output: Tensor, inputs: list[Tensor], reduction: Reduction) -> None:
    """Pieces may differ in size from rank to rank."""
    if len({piece.numel() for piece in inputs}) == 1 and transport.algorithm != "exchange":
        reduce_scatter_single(transport, output, torch.cat([piece.detach().reshape(-1) for piece in inputs]), reduction)
    else:
        reduce_scatter_pieces(transport, output, inputs, reduction)


def reduce_scatter_pieces(transport: Transport, output: Tensor, inputs: list[Tensor], reduction: Reduction) -> None:
    """By one exchange and a sum, straight from the caller's tensors."""
    dense = _dense(output)
    pieces = [reduction.of(_dense(piece)).view(-1) for piece in inputs]
    if reduction.factor is not None:
        pieces = [_product(piece, reduction.factor).to(piece.dtype) for piece in pieces]
    target = reduction.of(dense).view(-1)
    algorithms.reduce_scatter(transport, target, pieces, reduction.operation, _divisor(transport, reduction))
    _give_back(output, dense)


def all_to_all_single(
    transport: Transport, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> None:
    """Rows of `input` to the ranks; no splits means equal ones."""
    dense = _dense(output)
    if not (output_splits or input_splits):
        transport.all_to_all(dense, _apart(input, dense))
        _give_back(output, dense)
        return
    sent = _split(_apart(input, dense), input_splits, transport.size)
    transport.exchange(sent, _split(dense, output_splits, transport.size))
    _give_back(output, dense)


def all_to_all(transport: Transport, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    dense = [_dense(output) for output in outputs]
    transport.exchange([(rank, _dense(tensor)) for rank, tensor in enumerate(inputs)], list(enumerate(dense)))
    _give_all_back(outputs, dense)


def barrier(transport: Transport, timeout: timedelta) -> None:
    transport.barrier(timeout)


def one_after_another(transport: Transport, operation, *lists) -> None:  # type: ignore[no-untyped-def]
    """A coalesced form: `operation` on the first of each list, then on the second of each, …"""
    for arguments in zip(*lists, strict=True):
        operation(transport, *arguments)


def _flat(argument: Any) -> list[Tensor]:
    """The tensors in an argument: itself, or those of a list, or of the lists of a list."""
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for inner in argument for tensor in _flat(inner)] if type(argument) is list else []


def _prepared(tensor: Tensor, reduction: Reduction) -> Tensor:
    """The elements that will be reduced, premultiplied."""
    flat = reduction.of(tensor.detach())
    if reduction.factor is not None:
        copy_memory(flat, _product(flat, reduction.factor))
    return flat


def _product(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """In fp32 for the low precisions, which have not all a multiplication of their own."""
    return tensor.detach().float() * factor if tensor.dtype in LOW_PRECISION else tensor.detach() * factor


@torch.inference_mode()
def _divide(tensor: Tensor, divisor: int) -> None:
    tensor.detach().div_(divisor)


def _divided_before_rounding(transport: Transport, reduction: Reduction, dtype: torch.dtype) -> bool:
    """The mean of low-precision numbers may be in range where their sum is not. (NCCL adds them in its own way.)"""
    return reduction.average and dtype in LOW_PRECISION and transport.name != "nccl"


def _divisor(transport: Transport, reduction: Reduction) -> int:
    return transport.size if reduction.average else 1


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def _apart(tensor: Tensor, other: Tensor) -> Tensor:
    """`tensor`, contiguous and in memory that `other` has no part in: MPI refuses buffers that overlap."""
    dense = _dense(tensor)
    begin, end = other.data_ptr(), other.data_ptr() + other.nbytes
    return dense.detach().clone() if begin < dense.data_ptr() + dense.nbytes and dense.data_ptr() < end else dense


def _give_back(tensor: Tensor, dense: Tensor) -> None:
    if dense is not tensor and dense.data_ptr() != tensor.data_ptr():
        copy_memory(tensor, dense)


def _give_all_back(tensors: list[Tensor], dense: list[Tensor]) -> None:
    for tensor, copy in zip(tensors, dense, strict=True):
        _give_back(tensor, copy)


def _split(tensor: Tensor, splits: Sequence[int], size: int) -> list[tuple[int, Tensor]]:
    return list(enumerate(tensor.split(list(splits)) if splits else torch.tensor_split(tensor, size)))
