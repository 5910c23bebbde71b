"""What the ranks of a new group tell each other before anything else: their routes, their node and their GPU.

On a node are those who share its name, its boot and its shared memory; containers that share the first two do not.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch.distributed import DistBackendError, is_nccl_available

from echelon.comm.routes import Place
from echelon.comm.torch_compat import gpu_to_be
from echelon.comm.transports import Transport, show
from echelon.launch.report import ranks_text


def meet(transport: Transport, ranks: Sequence[int], table: str) -> tuple[Place, list[int]]:
    """What the group is to its routes, and the node of each of its ranks, numbered from 0.

    `table` stands for the routes that this rank has; an error names the ranks (in the world) whose routes differ.
    """
    told = [words.split(" ") for words in show(transport, f"{table} {_node()} {gpu_to_be()}")]
    if differing := differences([theirs for theirs, _, _ in told], ranks):
        raise DistBackendError(
            f"the ranks of a group must hold the same table of routes (ECHELON_ROUTE), but they hold: {differing}; "
            "give all of them the same file"
        )
    names = list(dict.fromkeys(node for _, node, _ in told))
    nodes = [names.index(node) for _, node, _ in told]
    gpus = {(node, gpu) for _, node, gpu in told if gpu != "-"}
    own_gpus = is_nccl_available() and len(gpus) == len(told)
    return Place(len(told), len(names), transport.name == "mpi", own_gpus), nodes


def differences(words: Sequence[str], ranks: Sequence[int]) -> str:
    """Who said what, if not all said the same: `ranks 0, 2: this; rank 1: that`."""
    sayers = defaultdict(list)
    for rank, said in zip(ranks, words, strict=True):
        sayers[said].append(rank)
    return "; ".join(f"{ranks_text(who)}: {said}" for said, who in sayers.items()) if len(sayers) > 1 else ""


@cache
def _node() -> str:
    boot, memory = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    booted = boot.read_text().strip() if boot.exists() else ""
    shared = os.stat(memory).st_dev if memory.is_dir() else ""
    return f"{socket.gethostname()}/{booted}/{shared}".replace(" ", "_")
