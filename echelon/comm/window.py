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

_SHARE = 4  # a window takes no more than this part of what is free: a job has several groups
_SMALLEST_AREA = 2**16  # bytes


class Window:
    """This rank's view of the memory, in bytes."""

    def __init__(self, memory: NDArray[np.uint8], ranks: int) -> None:
        self.area = len(memory) // (2 * (ranks + 1))
        halves = memory.reshape(2, ranks + 1, self.area)
        self.of_rank = [list(half[:-1]) for half in halves]  # by half and rank
        self.of_all = [half[-1] for half in halves]  # by half


def open_window(ranks: Transport, everyone: Transport, area: int) -> Window:
    """With areas of that many bytes at most. Called by the ranks of a node together, and by all nodes at once: if one
    rank cannot have it, all of `everyone` raise the reason.
    """
    name, size, handle, problem = "", 0, -1, ""
    if ranks.rank == 0:
        try:
            handle, name = tempfile.mkstemp(prefix="echelon-window-", dir=_folder())
            size = _size(os.statvfs(handle), ranks.size, area)
            os.posix_fallocate(handle, 0, size)  # where there is no room, better now than at the first write
        except OSError as error:
            problem = f"there is no room for {size // 2**10} KiB of shared memory in {_folder()} ({error.strerror})"
    name, told = show(ranks, f"{name}|{size}")[0].split("|")
    if ranks.rank and name:
        try:
            handle, size = os.open(name, os.O_RDWR), int(told)
        except OSError as error:
            problem = f"the node's shared memory cannot be opened ({error})"
    problems = [text for text in show(everyone, problem) if text]
    if ranks.rank == 0 and name:
        Path(name).unlink()
    if problems:
        if handle >= 0:
            os.close(handle)
        raise RuntimeError(f"{problems[0]}: free some of it, or choose another road than shared and two-level")
    memory = mmap.mmap(handle, size)
    os.close(handle)
    return Window(np.frombuffer(memory, dtype=np.uint8), ranks.size)


def _size(room: os.statvfs_result, ranks: int, area: int) -> int:
    """Two halves, each of an area for every rank and one for all; smaller where there is little room."""
    areas = 2 * (ranks + 1)
    fitting = room.f_bavail * room.f_frsize // _SHARE // areas // 4096 * 4096
    return areas * max(min(area, fitting), _SMALLEST_AREA)


def _folder() -> str:
    memory = "/dev/shm"
    return memory if Path(memory).is_dir() else tempfile.gettempdir()
