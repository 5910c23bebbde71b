"""How many pages the cache has: as many as the memory that is set aside for it holds, the same on all ranks.

On a GPU that is all that weights and steps leave. What steps take is measured before there is a cache: the largest ones
that the settings allow are computed over a small one, with whatever is captured for them. What is captured lies partly
in the driver's memory, of which PyTorch knows nothing: that is what the driver has back when it is gone.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from echelon.launch.identity import identity
from echelon.parallel.tensor import kv_heads_of
from echelon.serve.rehearsal import rehearse
from echelon.serve.settings import Settings
from echelon.serve.step import Shape
from echelon.serve.way import build, choose, prepare

_SHARE_OF_HOST = 0.2  # of what is free: a host has others to serve
_SHARE_OF_GPU = 0.85  # the same, where steps are not measured
_RESERVE_OF_GPU = 2**29  # bytes that libraries may still take, and that fragments of memory may cost


def shape(model: Any, settings: Settings, group: dist.ProcessGroup | None) -> Shape:
    """At most as many pages as all requests that run at once can fill, and the same number on all ranks."""
    a_page, row_pages = page_bytes(model, settings.page_size), _row_pages(model, settings)
    device = next(model.parameters()).device
    with enough_for(
        f"steps of {settings.token_budget} tokens and {settings.most_running} requests beside the model: lower "
        "--token-budget or --most-running, or serve over more ranks"
    ):
        room = settings.cache_gib * 2**30 or _free(model, settings, device, group)
    count = min(int(room // a_page), settings.most_running * row_pages)
    if group is not None and group.size() > 1:
        least = torch.tensor(count)
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
        count = int(least)
    if count < 2:
        raise ValueError(
            f"the cache has room for {max(count, 0)} pages of {settings.page_size} tokens ({text(a_page)} each): "
            "give it more memory (--cache-gib), or serve over more ranks"
        )
    if (longest := context(model, settings, count)) < settings.context:
        raise ValueError(
            f"the cache has room for {longest} tokens, and --context asks for {settings.context}: give it more memory "
            "(--cache-gib), lower --context, or serve over more ranks"
        )
    return Shape(count, settings.page_size, settings.most_running, min(row_pages, count))


@contextmanager
def enough_for(what: str) -> Iterator[None]:
    """ValueError where there is not, for PyTorch or for a GPU's driver."""
    try:
        yield
    except RuntimeError as error:
        if not any(said in str(error) for said in ("out of memory", "can't allocate memory")):
            raise
        raise ValueError(f"there is no memory for {what}") from None


def context(model: Any, settings: Settings, pages: int) -> int:
    """The most tokens of a prompt with its answer."""
    return min(int(settings.context or model.config.context), pages * settings.page_size)


def _row_pages(model: Any, settings: Settings) -> int:
    return -(-int(settings.context or model.config.context) // settings.page_size)


def text(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def page_bytes(model: Any, page_size: int) -> int:
    """Of the keys and values of all layers, on this rank."""
    per_token = 0
    for block in model.blocks:
        per_token += 2 * block.attention.head_dim * kv_heads_of(block.attention)
    element: int = next(model.parameters()).element_size()
    return int(per_token * page_size * element)


def _free(model: Any, settings: Settings, device: torch.device, group: dist.ProcessGroup | None) -> float:
    if device.type != "cuda":
        ranks_here = identity().local_size or identity().size
        return _SHARE_OF_HOST * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_here
    with torch.cuda.device(device):
        return _left_on_gpu(model, settings, device, group)


def _left_on_gpu(model: Any, settings: Settings, device: torch.device, group: dist.ProcessGroup | None) -> float:
    is_fused = choose(model, settings).fused
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    gpus: list[Any] = [gpu]
    if group is not None:
        gpus = [None] * group.size()
        dist.all_gather_object(gpus, gpu, group)
    sharing = gpus.count(gpu)
    draws_here = group is None or group.rank() == 0
    steps = _taken_by_steps(model, settings, device, draws_here, is_alone=sharing == 1) if is_fused else 0.0
    if group is not None:
        dist.barrier(group)  # after which none is still measuring
    free = torch.cuda.mem_get_info(device)[0] / sharing
    if group is not None:
        dist.barrier(group)  # before which none takes its share
    if not is_fused:  # then what a step takes grows with the lengths of its sequences
        return _SHARE_OF_GPU * free
    return free - _RESERVE_OF_GPU - steps


def _taken_by_steps(model: Any, settings: Settings, device: torch.device, draws_here: bool, *, is_alone: bool) -> float:
    """Bytes, beside weights and cache: of the largest steps, over a cache that is just large enough for them. What the
    driver holds can be told only by who is alone on the GPU; others have the reserve for it.
    """
    prepare(model)
    pages = -(-settings.token_budget // settings.page_size) + settings.most_running
    small = Shape(pages, settings.page_size, settings.most_running, _row_pages(model, settings))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    way = build(model, small, settings)
    rehearse(way, small, settings.token_budget, context(model, settings, pages), draws_here)
    taken = torch.cuda.max_memory_reserved(device) - before
    with_graphs = _of_driver(device)
    del way
    gc.collect()
    torch.cuda.empty_cache()
    graphs = max(with_graphs - _of_driver(device), 0) if is_alone else 0
    return taken + graphs - page_bytes(model, settings.page_size) * pages


def _of_driver(device: torch.device) -> int:
    """Bytes of the GPU that are taken, and not by PyTorch's allocator."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
