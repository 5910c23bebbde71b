"""An ordinary DDP script: what it prints must not depend on what started it. The backend is its only argument."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.full((2, 4), float(rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    places = [None] * size
    dist.all_gather_object(places, (rank, int(os.environ["LOCAL_RANK"])))
    if rank == 0:
        weights = [round(w, 5) for w in model.module.weight.flatten().tolist()]
        transport = getattr(dist.group.WORLD, "transport", "none")
        print("RESULT", json.dumps({"size": size, "places": places, "weights": weights, "transport": transport}))
    dist.destroy_process_group()
    if sys.argv[1] == "gloo":
        time.sleep(0.2)  # PyTorch's own group aborts if its threads still hold tensors at exit (pytorch#179291)


main()
