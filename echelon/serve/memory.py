"""How many pages the cache has: as many as the memory that is set aside for it holds, the same on all ranks.

On a GPU that is all that weights and steps leave. What steps take is measured before there is a cache: the largest ones
that the settings allow are computed over a small one, with whatever is captured for them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from echelon.launch.identity import identity
from echelon.serve.request import SamplingParams
from echelon.serve.sample import Draw
from echelon.serve.settings import Settings
from echelon.serve.step import Part, Shape

_SHARE_OF_HOST = 0.2  # of what is free: a host has others to serve
_RESERVE_OF_GPU = 2**29  # bytes that libraries may still take, and that fragments of memory may cost


def shape(model: Any, settings: Settings, group: dist.ProcessGroup | None) -> Shape:
    """At most as many pages as all requests that run at once can fill, and the same number on all ranks."""
    a_page = page_bytes(model, settings.page_size)
    most = settings.context or model.config.context
    row_pages = -(-most // settings.page_size)
    device = next(model.parameters()).device
    room = settings.cache_gib * 2**30 or _free(model, settings, device, group)
    count = min(int(room // a_page), settings.most_running * row_pages)
    if group is not None and group.size() > 1:
        least = torch.tensor(count)
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
        count = int(least)
    if count < 2:
        raise ValueError(
            f"the cache has room for {max(count, 0)} pages of {settings.page_size} tokens ({a_page / 2**20:.1f} MiB "
            "each): give it more memory (--cache-gib), or serve over more ranks"
        )
    return Shape(count, settings.page_size, settings.most_running, min(row_pages, count))


def context(model: Any, settings: Settings, pages: int) -> int:
    """The most tokens of a prompt with its answer."""
    return min(int(settings.context or model.config.context), pages * settings.page_size)


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


def _free(model: Any, settings: Settings, device: torch.device, group: dist.ProcessGroup | None) -> float:
    if device.type != "cuda":
        ranks_here = identity().local_size or identity().size
        return _SHARE_OF_HOST * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_here
    steps = _taken_by_steps(model, settings, device, group is None or group.rank() == 0)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    gpus: list[Any] = [gpu]
    if group is not None:
        gpus = [None] * group.size()
        dist.all_gather_object(gpus, gpu, group)  # after which none is still measuring
    free = torch.cuda.mem_get_info(device)[0]
    if group is not None:
        dist.barrier(group)  # before which none takes its share
    return (free - _RESERVE_OF_GPU) / gpus.count(gpu) - steps


def _taken_by_steps(model: Any, settings: Settings, device: torch.device, draws_here: bool) -> float:
    """Bytes, beside weights and cache; all ranks that share a model measure together, and one draws."""
    from echelon.serve.way import build

    pages = -(-settings.token_budget // settings.page_size) + settings.most_running
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    way = build(model, Shape(pages, settings.page_size, settings.most_running, pages), settings)
    with torch.inference_mode():
        for parts, draws in _largest_steps(settings, pages):
            way.launch(parts, draws if draws_here else None)
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_reserved(device) - before
    del way
    gc.collect()
    torch.cuda.empty_cache()
    return taken - page_bytes(model, settings.page_size) * pages


def _largest_steps(settings: Settings, pages: int) -> Iterator[tuple[list[Part], list[Draw]]]:
    """A prompt of all tokens that a step may have; and as many answers as there may be, drawn in the costliest way."""
    draw = Draw(SamplingParams(top_p=0.5, top_k=2, logprobs=1), (0, 0), [0], 1)
    yield [Part(0, 0, [0] * settings.token_budget, 0, list(range(pages)), True)], [draw]
    rows = range(settings.most_running)
    yield [Part(row, 0, [0], 0, [row], True) for row in rows], [draw for _ in rows]
