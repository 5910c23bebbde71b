"""Rank 1 does its part in a gather, destroys its group and ends, long before rank 2 comes: nothing is wrong with that.

Before, rank 1 stops waiting for a message (with a timeout of its own), and all compute for longer than the group's
timeout.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("echelon", timeout=timedelta(seconds=4))
rank = dist.get_rank()
dist.barrier()
if rank == 1:
    work = dist.irecv(torch.ones(1), 0, tag=5)
    try:
        work.wait(timedelta(seconds=0.5))
    except dist.DistBackendError:
        print("NOT YET", flush=True)
time.sleep(7)
if rank == 0:
    dist.send(torch.ones(1), 1, tag=5)
if rank == 1:
    assert work.wait()
if rank == 2:
    time.sleep(3.5)
dist.gather(torch.ones(1), [torch.ones(1) for _ in range(3)] if rank == 0 else None)
dist.destroy_process_group()
