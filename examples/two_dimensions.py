"""Tensor parallelism inside pairs of ranks, FSDP2 across them, and a record of what each dimension sends.

echelon run -n 4 --record record examples/two_dimensions.py
echelon trace record --plot traffic.png
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("echelon")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
for block in blocks:
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
model = fully_shard(nn.Sequential(*blocks), mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())  # the ranks of a pair see the same data
for step in range(10):
    x = torch.randn(128, 256, generator=generator)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.4f}")
dist.destroy_process_group()
