"""An algorithm over a transport, which is a transport again: some collectives go another way, all else is the host's.

An algorithm is its functions, by the names of the operations that it has: each takes the transport and then what the
transport's own method takes. So one algorithm serves any transport, and a recorder can stand between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from echelon.comm.reduction import HALF_PRECISION
from echelon.comm.transports import Transport


class Overlay:
    """`host` with the ways of an algorithm. `written` tells how many bytes this rank has put into memory that others
    read.
    """

    all_reduce: Callable[..., None]
    reduce: Callable[..., None]
    reduce_scatter: Callable[..., None]
    all_gather: Callable[..., None]
    all_to_all: Callable[..., None]
    broadcast: Callable[..., None]
    all_gather_uneven: Callable[..., None]
    exchange: Callable[..., None]
    barrier: Callable[..., None]
    send: Callable[..., Any]
    receive: Callable[..., Any]

    def __init__(
        self,
        host: Transport,
        algorithm: str,
        ways: Mapping[str, Callable[..., None]],
        halves: bool = False,
        written: Callable[[], int] = lambda: 0,
    ) -> None:
        """`halves`: whether the algorithm reduces bf16 and fp16 itself, with sums in fp32."""
        self.host, self.algorithm, self.ways = host, algorithm, ways
        self.halves, self.written = halves, written
        self.name, self.rank, self.size, self.highest_tag = host.name, host.rank, host.size, host.highest_tag
        self.reducible: frozenset[torch.dtype] = host.reducible | (HALF_PRECISION if halves else frozenset())
        for operation in Overlay.__annotations__:
            way = ways.get(operation)
            setattr(self, operation, getattr(host, operation) if way is None else partial(way, host))

    def over(self, host: Transport, ways: Mapping[str, Callable[..., None]]) -> Overlay:
        """The same over another transport for the same ranks, with other ways of the same operations."""
        return Overlay(host, self.algorithm, ways, self.halves, self.written)

    def close(self) -> None:
        """Host and memory belong to the group's roads."""
