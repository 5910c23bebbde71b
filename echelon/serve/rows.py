"""How many rows products should have. A library chooses by their number how to multiply, and not always well: on an
H200 448 rows of an 8B model take a third longer than 464. So what is filled up anyway is filled up to what is fast, as
measured where it will run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_FURTHER, _STEP = 64, 16  # rows that may be added, and of how many the steps are
_WORTH = 0.95  # of the time that the fewest rows take: what saves less than that may be chance
_TRIES, _TIMES = 3, 4


def quickest(least: int, seconds: Callable[[int], float]) -> int:
    """So many rows, or some more if that takes clearly less time."""
    fastest = min(range(least, least + _FURTHER + 1, _STEP), key=seconds)
    return fastest if seconds(fastest) < _WORTH * seconds(least) else least


def layer_seconds(attention: Any, mlp: Callable[[Any], Any]) -> Callable[[int], float]:
    """What tells how long a layer's products take with so many rows. Without a GPU nothing is known of it; and where
    they take less than to launch them, one number is like another.
    """
    weight = attention.qkv.weight
    like = {"device": weight.device, "dtype": weight.dtype}

    @cache
    @torch.inference_mode()
    def seconds(rows: int) -> float:
        if weight.device.type != "cuda":
            return 0.0
        chance = torch.Generator(weight.device)  # of its own: whoever makes an engine may have seeded PyTorch's
        x_TD, heads_TD = (
            torch.randn(rows, part.weight.shape[1], generator=chance, **like) for part in (attention.qkv, attention.out)
        )
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took = []
        for _ in range(_TRIES):
            began.record()
            for _ in range(_TIMES):
                attention.qkv(x_TD), attention.out(heads_TD), mlp(x_TD)
            ended.record()
            ended.synchronize()
            took.append(began.elapsed_time(ended) / 1e3)
        return float(min(took)) / _TIMES

    return seconds
