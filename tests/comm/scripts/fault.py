"""A program of random collectives, the same on all ranks, in which one rank does what it should not at some moment.

`fault.py KIND VICTIM MOMENT SEED`; every rank says PROCESS and its number, so that the test can see them all gone.
"""

import os
import random
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.comm.faults import OPERATIONS, Fault, program

fault = Fault(sys.argv[1], *map(int, sys.argv[2:]))
dist.init_process_group("echelon", timeout=timedelta(seconds=fault.timeout))
rank, size = dist.get_rank(), dist.get_world_size()
print("PROCESS", os.getpid(), flush=True)


def call(name: str, asynchronous: bool = False) -> None:
    x, parts = torch.ones(6), list(torch.ones(size, 2))
    match name:
        case "all_reduce":
            dist.all_reduce(x, async_op=asynchronous)
        case "broadcast":
            dist.broadcast(x, 0)
        case "all_gather":
            dist.all_gather(parts, torch.ones(2))
        case "reduce_scatter":
            dist.reduce_scatter(torch.ones(2), parts)
        case "barrier":
            dist.barrier()


def misbehave(instead_of: str) -> None:
    match fault.kind:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("on purpose")
        case "exits":
            sys.exit(7)
        case "leaves":
            raise SystemExit
        case "vanishes":
            os._exit(0)
        case "late":
            time.sleep(1000)
        case "silent":
            dist.recv(torch.ones(1), (rank + 1) % size)
        case "another" | "another-checked":
            call(next(name for name in OPERATIONS if name != instead_of))
        case "shape-checked":
            dist.all_reduce(torch.ones(7))
        case "dtype-checked":
            dist.all_reduce(torch.ones(6, dtype=torch.int32))
    raise AssertionError(f"{fault.kind} went unnoticed")


for moment, name in enumerate(program(fault)):
    if (rank, moment) == (fault.victim, fault.moment):
        misbehave(name)
    call(name, asynchronous=random.random() < 0.3)
