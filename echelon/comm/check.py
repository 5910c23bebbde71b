"""`ECHELON_CHECK=1`: before each collective the ranks compare what they are about to do.

A mismatch (another operation, shape, dtype, reduction or root) is otherwise a hang, a crash inside MPI or, worst,
a wrong result. Each rank shows the others its call in words; who differs is named in the error, which all ranks raise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from echelon.comm import operations
from echelon.comm.meeting import differences
from echelon.comm.operations import Call
from echelon.comm.reduction import Reduction
from echelon.comm.routes import Road
from echelon.comm.transports import Transport, show

CHECKING = os.environ.get("ECHELON_CHECK", "0") not in ("", "0")


def compare(transport: Transport, call: Call, road: Road, ranks: Sequence[int]) -> None:
    """Raise an error unless all ranks (whose numbers in the world are `ranks`) are about to do the same."""
    calls = show(transport, _words(call))
    if differing := differences(calls, ranks) or differences(show(transport, f"{calls[0]} over {road}"), ranks):
        raise DistBackendError(f"the ranks' calls do not match: {differing}")
    if call.operation in (operations.all_to_all, operations.all_to_all_single):
        _compare_splits(transport, call, ranks)


def _words(call: Call) -> str:
    """The call, as far as it must be the same on all ranks."""
    arguments: Any = call.arguments
    if call.operation is operations.one_after_another:
        arguments = arguments[1:]
    elif call.operation is operations.barrier:  # each rank may be as patient as it likes
        arguments = []
    elif call.operation in (
        operations.gather,
        operations.scatter,
    ):  # the list is the root's, and sizes may differ
        return f"{call.name}({call.dtype}, root {arguments[-1]})".replace("torch.", "")
    elif call.operation is operations.reduce_scatter:  # each rank's output may be of another size
        arguments = arguments[1:]
    elif call.operation in (operations.all_to_all, operations.all_to_all_single):
        return f"{call.name} of {call.dtype}"
    elif call.operation is operations.all_gather:  # each rank's own tensor may be of another size
        arguments = arguments[:1]
    return f"{call.name}({', '.join(_word(argument) for argument in arguments)})".replace("torch.", "")


def _word(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"{argument.dtype}{list(argument.shape)}"
    if isinstance(argument, Reduction):
        return f"{argument.operation}{' averaged' if argument.average else ''}"
    if isinstance(argument, list):
        return f"[{', '.join(map(_word, argument))}]"
    return f"root {argument}"


def _compare_splits(transport: Transport, call: Call, ranks: Sequence[int]) -> None:
    """What a rank sends to another must be what that one expects."""
    expected, sent = (_counts(transport, *pair) for pair in _pairs(call))
    announced = torch.empty(transport.size, dtype=torch.int64)
    sent_t = torch.tensor(sent)
    peers = range(transport.size)
    transport.exchange([(peer, sent_t[peer : peer + 1]) for peer in peers], [(p, announced[p : p + 1]) for p in peers])
    wrong = [
        f"rank {ranks[peer]} sends {count} elements, but rank {ranks[transport.rank]} expects {wanted} from it"
        for peer, (count, wanted) in enumerate(zip(announced.tolist(), expected, strict=True))
        if count != wanted
    ]
    verdicts = [verdict for verdict in show(transport, "; ".join(wrong)) if verdict]
    if verdicts:
        raise DistBackendError(f"the ranks' calls of {call.name} do not match: {'; '.join(verdicts)}")


def _pairs(call: Call) -> list[tuple[Any, Any]]:
    """(output, its splits) and (input, its splits)."""
    if call.operation is operations.all_to_all:
        return [(tensors, None) for tensors in call.arguments]
    output, input, output_splits, input_splits = call.arguments
    return [(output, output_splits), (input, input_splits)]


def _counts(transport: Transport, tensors: Any, splits: Any) -> list[int]:
    if isinstance(tensors, list):
        return [tensor.numel() for tensor in tensors]
    row = tensors.numel() // tensors.shape[0] if tensors.dim() and tensors.shape[0] else 1
    if not splits:
        return [tensors.numel() // transport.size] * transport.size
    return [count * row for count in splits]
