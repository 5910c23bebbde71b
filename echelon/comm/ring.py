"""Collectives around a ring: every rank sends to the next and receives from the one before, so that each link carries
the same at every step. A reduction adds a piece at every rank that it passes; each piece is finished at one rank, so
all ranks get the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm import algorithms
from echelon.comm.transports import Transport, copy_memory


def all_reduce(host: Transport, tensor: Tensor, operation: str) -> None:
    rows = list(torch.tensor_split(tensor.view(-1), host.size))
    _reduce(host, rows, operation)
    _gather(host, rows)


def reduce_scatter(host: Transport, output: Tensor, input: Tensor, operation: str) -> None:
    rows = list(input.detach().clone().view(host.size, -1))
    _reduce(host, rows, operation)
    copy_memory(output.view(-1), rows[host.rank])


def all_gather(host: Transport, output: Tensor, input: Tensor) -> None:
    rows = list(output.view(host.size, -1))
    if rows[host.rank].data_ptr() != input.data_ptr():
        copy_memory(rows[host.rank], input.view(-1))
    _gather(host, rows)


def all_to_all(host: Transport, output: Tensor, input: Tensor) -> None:
    """By distance: what is for the rank `step` places on leaves at that step."""
    there, back = input.view(host.size, -1), output.view(host.size, -1)
    for step in range(host.size):
        after, before = (host.rank + step) % host.size, (host.rank - step) % host.size
        host.exchange([(after, there[after])], [(before, back[before])])


def _reduce(host: Transport, rows: list[Tensor], operation: str) -> None:
    """In the end row `rank` holds the sum; the others hold what was passed on."""
    after, before = (host.rank + 1) % host.size, (host.rank - 1) % host.size
    arrived = torch.empty_like(max(rows, key=len))
    for step in range(host.size - 1):
        sent, row = rows[(host.rank - step - 1) % host.size], rows[(host.rank - step - 2) % host.size]
        part = arrived[: len(row)]
        host.exchange([(after, sent)], [(before, part)])
        algorithms.accumulate([part, row], operation, row)


def _gather(host: Transport, rows: list[Tensor]) -> None:
    after, before = (host.rank + 1) % host.size, (host.rank - 1) % host.size
    for step in range(host.size - 1):
        sent, row = rows[(host.rank - step) % host.size], rows[(host.rank - step - 1) % host.size]
        host.exchange([(after, sent)], [(before, row)])
