"""Operations on CUDA and CPU tensors of one group, and a DDP step on the GPU."""

import json
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon  # noqa: F401 (for where it is not installed)

warnings.filterwarnings("ignore", category=FutureWarning)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("echelon")
rank, size = dist.get_rank(), dist.get_world_size()
total = size * (size + 1) / 2

for place in (device, torch.device("cpu")):
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64):
        x = torch.full((64,), rank + 1).to(dtype).to(place)
        for asynchronous in (False, True):
            y = x.clone()
            work = dist.all_reduce(y, async_op=asynchronous)
            if work is not None:
                assert work.wait()
            assert (y.float() == total).all(), (place, dtype, y)
        out = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(out, x)
        assert [int(o[0].float()) for o in out] == list(range(1, size + 1))
        whole = x.repeat(size)
        part = torch.empty_like(x)
        dist.reduce_scatter_tensor(part, whole)
        assert (part.float() == total).all()
        swapped = torch.empty_like(whole)
        dist.all_to_all_single(swapped, whole)
        assert swapped.float().sum() == 64 * total
        dist.broadcast(x, 0)
        assert (x.float() == 1).all()
    mean = torch.full((8,), float(rank), device=place)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert (mean == (size - 1) / 2).all()

model = DistributedDataParallel(nn.Linear(4, 4).to(device), device_ids=[device.index])
model(torch.ones(2, 4, device=device)).sum().backward()
assert (model.module.weight.grad == 2).all()
dist.barrier()
if rank == 0:
    group = dist.group.WORLD
    cuda = group.road("all_reduce", 4, device="cuda").transport
    print("RESULT", json.dumps({"cpu": group.transport, "cuda": cuda, "ranks": size}))
dist.destroy_process_group()
