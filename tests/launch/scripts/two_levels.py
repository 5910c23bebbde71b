"""Collectives in two levels on an emulated cluster equal one process, on nodes with as many ranks or not; and an
all_reduce lets no byte cross a link twice. ECHELON_ROUTE has chosen MPI's, for all groups.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import echelon

dist.init_process_group("echelon")
rank, size = dist.get_rank(), dist.get_world_size()
counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
COUNT = 100_003


def of(member: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-8, 8, (count,), generator=torch.Generator().manual_seed(member)).to(dtype)


def check(members: list[int], group: dist.ProcessGroup) -> None:
    me, number = members.index(rank), len(members)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        whole = [of(member, COUNT, dtype) for member in members]
        blocks = [of(member, number * 1000, dtype).view(number, -1) for member in members]
        dist.all_reduce(x := whole[me].clone(), group=group)
        assert torch.equal(x, torch.stack(whole).sum(0))
        dist.all_gather_into_tensor(x := torch.empty(number * COUNT, dtype=dtype), whole[me], group)
        assert torch.equal(x, torch.cat(whole))
        dist.reduce_scatter_tensor(x := torch.empty(1000, dtype=dtype), blocks[me].flatten(), group=group)
        assert torch.equal(x, torch.stack(blocks)[:, me].sum(0))
        dist.all_to_all_single(x := torch.empty(number * 1000, dtype=dtype), blocks[me].flatten(), group=group)
        assert torch.equal(x, torch.stack(blocks)[:, me].flatten())


for members in ([*range(size)], [0, 1, 2], [0, size - 1], [0, 1]):
    group = dist.new_group(members)
    if rank in members:
        assert str(group.road("all_reduce", 4)) == "mpi+two-level"
        check(members, group)
        with echelon.comm.route(group, "gloo+two-level"):
            check(members, group)

x = torch.full((int(sys.argv[1]) // 4,), float(rank))
dist.barrier()
before = int(counter.read_text())
dist.all_reduce(x)
dist.barrier()
sent = torch.tensor([int(counter.read_text()) - before])
dist.all_reduce(sent, dist.ReduceOp.MAX)
if rank == 0:
    print("RESULT", json.dumps({"sent": int(sent), "nodes": list(dist.group.WORLD.nodes)}))
dist.destroy_process_group()
