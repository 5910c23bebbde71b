"""Works, futures, messages and forks over Gloo: bodies of other tests, for torchrun on two ranks."""

import torch.distributed as dist

from tests.comm import test_point_to_point as messages
from tests.comm import test_work as works

dist.init_process_group("echelon")
bodies = (
    works.mixed_modes,
    works.wait_times_out,
    works.futures,
    works.from_many_threads,
    works.forked_workers,
    works.forked_child_is_refused,
    messages.tags,
    messages.ahead_of_a_collective,
    messages.large_without_a_waiter,
    messages.unmatched_receive_times_out,
)
for body in bodies:
    body()
if dist.get_rank() == 0:
    print("RESULT", dist.group.WORLD.transport, len(bodies))
dist.destroy_process_group()
