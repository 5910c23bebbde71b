"""Device tensors given to an MPI that is CUDA-aware: it reads and writes the device's memory itself.

MPI knows nothing of streams, so the host waits until the tensors are ready before it calls; when MPI returns, they are.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.comm.transports import Parcel, Request, Transport, exchange_rows


class DirectTransport:
    """`host`, called when what precedes on the current stream is done."""

    def __init__(self, host: Transport, device: torch.device) -> None:
        self.name = f"{host.name}, CUDA-aware"
        self.rank, self.size, self.reducible = host.rank, host.size, host.reducible
        self.highest_tag = host.highest_tag
        self.algorithm = ""
        self._host = host
        self._device = torch.get_device_module(device)

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        self._when_ready().all_reduce(tensor, operation)

    def reduce(self, tensor: Tensor, operation: str, root: int) -> None:
        self._when_ready().reduce(tensor, operation, root)

    def reduce_scatter(self, output: Tensor, input: Tensor, operation: str) -> None:
        self._when_ready().reduce_scatter(output, input, operation)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._when_ready().broadcast(tensor, root)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self._when_ready().all_gather(output, input)

    def all_gather_uneven(self, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        self._when_ready().all_gather_uneven(output, input, counts)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        exchange_rows(self, output, input)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        self._when_ready().exchange(sends, receives)

    def barrier(self, timeout: timedelta | None = None) -> None:
        self._host.barrier(timeout)

    def send(self, tensor: Tensor, rank: int, tag: int) -> Request:
        return self._when_ready().send(tensor, rank, tag)

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> Request:
        return self._when_ready().receive(tensor, rank, tag)

    def close(self) -> None:
        """The host's transport is closed by the group that it belongs to."""

    def _when_ready(self) -> Transport:
        ready: Any = self._device.Event()
        ready.record(self._device.current_stream())
        ready.synchronize()
        return self._host


@cache
def cuda_aware() -> bool:
    """Whether the MPI library in this process says that it takes device memory."""
    maps = Path("/proc/self/maps")
    found = re.search(r"\S*/libmpi[^/\s]*\.so\S*", maps.read_text()) if maps.exists() else None
    if found is None:
        return False
    library = ctypes.CDLL(found[0])
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH and its family
        flag = ctypes.c_int()
        library.MPIX_GPU_query_support(0, ctypes.byref(flag))  # 0 is MPIX_GPU_SUPPORT_CUDA
        return bool(flag.value)
    return hasattr(library, "MPIX_Query_cuda_support") and bool(library.MPIX_Query_cuda_support())
