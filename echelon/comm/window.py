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
from echelon.launch.start import memory_folder

_SHARE = 4  # a window takes this part of what is free at most, if that is of any use: a job has several groups
_SMALLEST_AREA = 2**16  # bytes


class Window:
    """This rank's view of the memory, in bytes."""

    def __init__(self, memory: NDArray[np.uint8], ranks: int, area: int) -> None:
        """`area` is what may be used of each: no more than the smallest of all nodes'."""
        self.area = area
        halves = memory.reshape(2, ranks + 1, -1)
        self.of_rank = [list(half[:-1]) for half in halves]  # by half and rank
        self.of_all = [half[-1] for half in halves]  # by half


def open_window(ranks: Transport, everyone: Transport, area: int) -> Window:
    """With areas of that many bytes at most. Called by the ranks of a node together, and by all nodes at once: if one
    rank cannot have it, all of `everyone` raise the reason.
    """
    name, size, handle, problem = "", 0, -1, ""
    if ranks.rank == 0:
        try:
            handle, name = tempfile.mkstemp(prefix="echelon-window-", dir=memory_folder())
            size = _size(os.statvfs(handle), ranks.size, area)
            os.posix_fallocate(handle, 0, size)  # where there is no room, better now than at the first write
        except OSError as error:
            problem = (
                f"there is no room for {size // 2**10} KiB of shared memory in {memory_folder()} ({error.strerror})"
            )
    there, told = show(ranks, f"{'' if problem else name}|{size}")[0].split("|")
    memory = None
    try:
        if there:
            handle, size = handle if ranks.rank == 0 else os.open(there, os.O_RDWR), int(told)
            memory = mmap.mmap(handle, size)
    except (OSError, ValueError) as error:
        problem = f"the node's shared memory cannot be opened ({error})"
    finally:
        if handle >= 0:
            os.close(handle)
    answers = [answer.split("|") for answer in show(everyone, f"{size // (2 * (ranks.size + 1))}|{problem}")]
    if ranks.rank == 0 and name:
        Path(name).unlink()
    if reasons := [reason for _, reason in answers if reason]:
        raise RuntimeError(f"{reasons[0]}: free some of it, or choose another road than shared and two-level")
    assert memory is not None
    return Window(np.frombuffer(memory, dtype=np.uint8), ranks.size, min(int(each) for each, _ in answers))


def _size(room: os.statvfs_result, ranks: int, area: int) -> int:
    """Two halves, each of an area for every rank and one for all; smaller where there is little room."""
    areas = 2 * (ranks + 1)
    fitting = room.f_bavail * room.f_frsize // _SHARE // areas // 4096 * 4096
    return areas * max(min(area, fitting), _SMALLEST_AREA)
