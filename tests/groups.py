"""The groups that tests make in a pool's ranks.

DTensor remembers meshes, and takes one for another that has the same shape and names but groups of its own. So either
groups are forgotten together with what DTensor remembers, or (torch 2.11 remembers more) they outlive the test.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from echelon.comm.torch_compat import dimensions

_kept: list[dist.ProcessGroup] = []


def keep_groups() -> None:
    """Let all groups that there are outlive the test."""
    _kept[:] = dist.distributed_c10d._world.pg_map


def forget_subgroups() -> None:
    """Destroy what the test made, so that a hundred tests do not use up MPI's communicators."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in (dist.group.WORLD, *_kept) and dist.get_backend(group) == "echelon":
            dist.destroy_process_group(group)
    if dist.is_initialized():  # what ran may have destroyed the world's group
        dimensions.pop(dist.group.WORLD.group_name, None)  # a mesh over all ranks takes the world's group, and names it
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
