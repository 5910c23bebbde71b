"""Memory of a GPU that several processes on it can read (CUDA IPC, through PyTorch, which counts who still does)."""

from __future__ import annotations

import ast
import threading

import torch
from torch import Tensor

HALF = 2**24  # bytes; a slot has two, so that one is written while the other is read
_SLOTS = 2  # messages that may be under way through an outbox at once


def place_of(device: torch.device) -> str:
    """Which GPU it is: no two have the same."""
    return str(torch.cuda.get_device_properties(device).uuid)


def show(memory: Tensor) -> str:
    """What one other process needs to open it, once: PyTorch keeps the memory until that process has let go of it."""
    return repr(memory.untyped_storage()._share_cuda_())


def opened(handle: str, device: torch.device) -> Tensor:
    """Another process's memory, until it is let go of."""
    storage = torch.UntypedStorage._new_shared_cuda(*ast.literal_eval(handle))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class Outbox:
    """Where a process puts messages for others on its GPU: memory in slots, one for each message under way.

    One for each device of a process, whatever its groups; the memory is taken when it is first needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.place = place_of(device)
        self._device = device
        self._memory: Tensor | None = None
        self._free: list[int] | None = None
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """A slot, if there is a free one."""
        with self._lock:
            if self._free is None:
                self._free = []
                try:
                    self._memory = self._allocate(_SLOTS * 2 * HALF)
                except torch.OutOfMemoryError:
                    return None
                self._free += range(_SLOTS)
            return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        with self._lock:
            assert self._free is not None
            self._free.append(slot)

    def half(self, slot: int, number: int) -> tuple[int, Tensor]:
        """One half of a slot, and where it begins in the memory."""
        assert self._memory is not None
        offset = (2 * slot + number % 2) * HALF
        return offset, self._memory[offset : offset + HALF]

    def show(self) -> str:
        """What one other process needs to open it; nothing if it cannot be shown."""
        assert self._memory is not None
        try:
            return show(self._memory)
        except RuntimeError:  # some ways of allocating cannot share
            return ""

    def open(self, handle: str) -> Tensor:
        """Another's; raises if that cannot be."""
        return opened(handle, self._device)

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


class Outboxes:
    """Those of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[torch.device, Outbox] = {}

    def of(self, device: torch.device) -> Outbox:
        with self._lock:
            if device not in self._made:
                self._made[device] = Outbox(device)
            return self._made[device]

    def close(self) -> None:
        self._made.clear()


outboxes = Outboxes()
