"""Prints the roads of an all_reduce, by size."""

import torch.distributed as dist

dist.init_process_group("echelon")
if dist.get_rank() == 0:
    print([str(dist.group.WORLD.road("all_reduce", 4**power)) for power in range(12)])
dist.destroy_process_group()
