"""Ends in the way its argument says, on rank 1, while the other ranks wait for it."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

how = sys.argv[1]
dist.init_process_group("echelon")
print("PROCESS", os.getpid(), flush=True)
dist.barrier()
if how == "killed":
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in maps if "/mpich_shm_" in line}:
        print("MEMORY", path, flush=True)
    dist.barrier()
if dist.get_rank() == 1:
    if how == "raises":
        raise ValueError("on purpose")
    if how == "exits":
        sys.exit(7)
    if how == "vanishes":
        os._exit(8)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleeps":
        print("SLEEPING", flush=True)
        time.sleep(1000)
x = torch.ones(2**20)
works = [dist.all_reduce(x, async_op=True) for _ in range(10)]  # never waited for
future = works[0].get_future()
receive = dist.irecv(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size(), tag=9)  # never sent
