"""How many pages the cache has: as many as the memory that is set aside for it holds, the same on all ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from echelon.launch.identity import identity
from echelon.serve.settings import Settings

_SHARE_OF_HOST, _SHARE_OF_GPU = 0.2, 0.85  # of what is free: a host has others to serve


def pages(model: Any, settings: Settings, group: dist.ProcessGroup | None) -> int:
    """At most as many as all requests that run at once can fill."""
    a_page = page_bytes(model, settings.page_size)
    device = next(model.parameters()).device
    room = settings.cache_gib * 2**30 or _free(device)
    context = settings.context or model.config.context
    useful = settings.most_running * -(-context // settings.page_size)
    count = min(int(room // a_page), useful)
    if group is not None and group.size() > 1:
        least = torch.tensor(count)
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
        count = int(least)
    if count < 2:
        raise ValueError(
            f"the cache has room for {max(count, 0)} pages of {settings.page_size} tokens ({a_page / 2**20:.1f} MiB "
            "each): give it more memory (--cache-gib), or serve over more ranks"
        )
    return count


def page_bytes(model: Any, page_size: int) -> int:
    """Of the keys and values of all layers, on this rank."""
    per_token = 0
    for block in model.blocks:
        per_token += 2 * block.attention.head_dim * kv_heads(block.attention)
    element: int = next(model.parameters()).element_size()
    return int(per_token * page_size * element)


def kv_heads(attention: Any) -> int:
    """How many of them this rank has."""
    rows = attention.qkv.weight.shape[0] // attention.head_dim
    return int(rows // (attention.queries_per_key + 2))


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        return _SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]
    ranks_here = identity().local_size or identity().size
    return _SHARE_OF_HOST * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_here
