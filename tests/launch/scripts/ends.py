"""Ends in the way its argument says, on rank 1, while the other ranks wait for it."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

how = sys.argv[1]
dist.init_process_group("echelon")
print("PROCESS", os.getpid(), flush=True)
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
dist.all_reduce(torch.ones(1))
