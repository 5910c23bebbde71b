"""Builds a layout over the nodes of an emulated cluster, and prints what each rank was warned of."""

import json
import sys
import warnings

import torch.distributed as dist

from echelon.parallel.layout import Layout

dist.init_process_group("echelon")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    Layout(dp=-1, tp=int(sys.argv[1])).build()
warned = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
everyone: list = [None] * dist.get_world_size()
dist.all_gather_object(everyone, warned)
if dist.get_rank() == 0:
    print("RESULT", json.dumps({"warned": everyone}))
dist.destroy_process_group()
