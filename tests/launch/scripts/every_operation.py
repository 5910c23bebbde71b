"""Every operation and dtype, in a job started by any launcher: used for torchrun, where the group works over Gloo."""

import warnings

import torch.distributed as dist

from tests.comm import test_operations as operations
from tests.comm.data import DTYPES, operations_of

warnings.filterwarnings("ignore", category=FutureWarning)
dist.init_process_group("echelon")
world = list(range(dist.get_world_size()))
ends = [world[0], world[-1]]
groups = [(world, None), (ends, dist.new_group(ends)), (world, None)]
count = 0
for dtype in DTYPES:
    for function in operations.MOVING:
        operations.check(function.__name__, dtype, bool(count % 2), *groups[count % 3])
        count += 1
    for op in operations_of(dtype):
        for function in operations.REDUCING:
            operations.check(function.__name__, dtype, bool(count % 2), *groups[count % 3], op)
            count += 1
if dist.get_rank() == 0:
    print("RESULT", dist.group.WORLD.transport, count)
dist.destroy_process_group()
