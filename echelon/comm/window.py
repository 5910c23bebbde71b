"""Memory that the ranks of one node share: a file without a name, which each of them has mapped.

Each rank has an area that the others read, and there is one that all write to, each a part of its own. Areas come in
two halves, used in turn. There are no locks: whoever uses a window has a barrier between writing and reading, and
between reading and writing the same half again.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.comm.transports import Transport, show

_LARGEST = 2**26  # bytes, of a window that many ranks share
_SMALLEST_AREA = 2**16


class Window:
    """This rank's view of the memory, in bytes."""

    def __init__(self, memory: NDArray[np.uint8], ranks: int) -> None:
        self.area = len(memory) // (2 * (ranks + 1))
        halves = memory.reshape(2, ranks + 1, self.area)
        self.of_rank = [list(half[:-1]) for half in halves]  # by half and rank
        self.of_all = [half[-1] for half in halves]  # by half


def open_window(ranks: Transport, area: int) -> Window:
    """Called by all ranks of a node together; raises on all of them if one cannot have it."""
    area = max(min(area, _LARGEST // (2 * (ranks.size + 1))), _SMALLEST_AREA)
    size = 2 * (ranks.size + 1) * area
    name, handle, problem = "", -1, ""
    if ranks.rank == 0:
        try:
            handle, name = tempfile.mkstemp(prefix="echelon-window-", dir=_folder())
            os.posix_fallocate(handle, 0, size)  # where there is no room, better now than at the first write
        except OSError as error:
            problem = f"no room for {size // 2**20} MiB of shared memory in {_folder()} ({error.strerror})"
    name = show(ranks, name)[0]
    if ranks.rank and name:
        try:
            handle = os.open(name, os.O_RDWR)
        except OSError as error:
            problem = f"the node's shared memory cannot be opened ({error})"
    problems = [text for text in show(ranks, problem) if text]
    if ranks.rank == 0 and name:
        Path(name).unlink()
    if problems:
        if handle >= 0:
            os.close(handle)
        raise RuntimeError(f"{problems[0]}: free some of it, or choose another road than shared and two-level")
    memory = mmap.mmap(handle, size)
    os.close(handle)
    return Window(np.frombuffer(memory, dtype=np.uint8), ranks.size)


def _folder() -> str:
    memory = "/dev/shm"
    return memory if Path(memory).is_dir() else tempfile.gettempdir()
