"""One rank of the pool: joins the process group, then runs whatever it is sent until it is told to stop."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from functools import reduce
from multiprocessing.connection import Client

import torch
import torch.distributed as dist

from tests.groups import forget_subgroups


def main() -> None:
    parent = Client((sys.argv[1], int(sys.argv[2])), authkey=bytes.fromhex(os.environ.pop("TESTS_RANK_KEY")))
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch"
    )  # torch 2.13 renames what 2.11 knows only by its old name
    dist.init_process_group("echelon")
    parent.send((dist.get_rank(), os.getpid()))
    while (order := parent.recv()) is not None:
        module, name, arguments = order
        try:
            torch.manual_seed(0)
            function = reduce(getattr, name.split("."), importlib.import_module(module))
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        forget_subgroups()
        parent.send(answer)


def gloo() -> dist.ProcessGroup:
    """The world over Gloo, to compare with.

    Made once, and kept: Gloo aborts the process when the last reference to a group goes inside a callback of its own.
    """
    made = [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == "gloo"]
    return made[0] if made else dist.new_group(backend="gloo")


if __name__ == "__main__":
    main()
