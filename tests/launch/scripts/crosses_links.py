"""An all_reduce over Echelon and one over Gloo, on an emulated cluster: what each rank's node sent over its link."""

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("echelon")
counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
sent = {}
for name, group in (("echelon", None), ("gloo", dist.new_group(backend="gloo"))):
    x = torch.full((int(sys.argv[1]) // 4,), float(dist.get_rank()))
    dist.barrier(group)
    before = int(counter.read_text())
    dist.all_reduce(x, group=group)
    dist.barrier(group)
    sent[name] = int(counter.read_text()) - before
    assert x.eq(sum(range(dist.get_world_size()))).all()
mine = {"host": socket.gethostname(), "local": os.environ["LOCAL_RANK"], "sent": sent}
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
if dist.get_rank() == 0:
    print("RESULT", json.dumps({"ranks": everyone}))
dist.destroy_process_group()
