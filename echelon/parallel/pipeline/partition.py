"""Where a chain of links is cut into stages: so that the dearest stage is as cheap as can be, and the others even.

What a link costs is told, or found: `memory` counts the bytes of its parameters, `time` measures its passes or, of a
model without memory, counts their floating-point operations.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from echelon.models.chain import Chain, Edge, Given, Linked, Value
from echelon.parallel.pipeline.statistics import frozen

Balance = Literal["memory", "time"] | Sequence[int]
_REPEATS = 3  # measurements of a link, of which the quickest counts


def partition(
    model: nn.Module,
    stages: int,
    balance: Balance = "memory",
    *,
    costs: Sequence[float] | None = None,
    example: Given | None = None,
) -> list[range]:
    """The links of each stage. `balance` may also be how many links each gets; `costs` are the links', where they are
    known. For "time" an `example` is needed: the arguments of one microbatch.

    The same on all ranks, but for measured times: measure on one, and give the others the costs or the counts.
    """
    chain = linked(model)
    count = len(chain.links())
    if stages < 1 or stages > count:
        raise ValueError(
            f"{_name(model)} is a chain of {count} links (its blocks, what comes before and after them), which cannot "
            f"be cut into {stages} stages: use 1 to {count}, or a deeper model"
        )
    if not isinstance(balance, str):
        return _by_counts(balance, stages, count, _name(model))
    if balance not in ("memory", "time"):
        raise ValueError(f"balance={balance!r}: it is memory, time, or how many links each stage gets")
    if costs is None:
        costs = bytes_of(chain) if balance == "memory" else times_of(chain, example)
    if len(costs) != count:
        raise ValueError(f"{len(costs)} costs for a chain of {count} links: each needs one")
    if not all(0 <= cost < math.inf for cost in costs):
        raise ValueError(f"costs={list(costs)}: what a link costs is 0 or more")
    return cut(costs, stages)


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Runs of links, none empty, whose largest sum of costs is as small as can be; of such, those whose sums have the
    smallest squares: where one link alone is the largest, the other stages are still alike.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    largest, _ = _best(sums, stages, max)
    _, starts = _best(sums, stages, lambda before, cost: before + cost**2 if cost <= largest else math.inf)
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(costs)], strict=True)]


def _best(sums: Sequence[float], stages: int, add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The least that `add` makes of the sums of all stages, and where these start."""
    count = len(sums) - 1
    # best[end]: of the first `end` links, cut into as many stages as were looked at
    best: list[tuple[float, list[int]]] = [(add(0.0, total), [0]) for total in sums]
    for stage in range(1, stages):
        after: list[tuple[float, list[int]]] = [(math.inf, [])] * (count + 1)
        for end in range(stage + 1, count + 1):
            totals = [add(best[at][0], sums[end] - sums[at]) for at in range(stage, end)]
            total = min(totals)
            at = stage + totals.index(total)
            after[end] = total, [*best[at][1], at]
        best = after
    return best[count]


def linked(model: nn.Module) -> Linked:
    """The model as a chain; an `nn.Sequential` becomes one, of the same modules with the same names."""
    if isinstance(model, Linked):
        return model
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return Chain.of(model)
    raise ValueError(
        f"{_name(model)} is no chain of links: make it an nn.Sequential, or a Chain or Linked of echelon.models.chain"
    )


def bytes_of(chain: Linked) -> list[float]:
    """Of each link's parameters. One that two links share is held by both."""
    return [
        float(sum(parameter.numel() * parameter.element_size() for parameter in _parameters(chain, names)))
        for names in chain.links()
    ]


def times_of(chain: Linked, example: Given | None) -> list[float]:
    """Of each link's passes, forward and backward: seconds or, on the meta device, floating-point operations."""
    if example is None:
        raise ValueError(
            'balance="time" needs an example, the arguments of one microbatch: give it to `partition`, and as the '
            "balance elsewhere how many links each stage has got there"
        )
    values = example.values() if isinstance(example, Mapping) else example
    on_meta = any(parameter.is_meta for parameter in chain.parameters())
    if any(isinstance(each, Tensor) and each.is_meta != on_meta for each in values):
        raise ValueError(f"{_name(chain)} and its example: both or neither must be on the meta device")
    received: dict[Edge, Value] = {}
    costs = []
    for link in range(len(chain.links())):
        span = range(link, link + 1)
        into, _ = chain.crossing(span)
        taken = {edge: _leaf(received.pop(edge)) for edge in into}
        passes = _Passes(chain, span, example, taken)
        with frozen(chain):
            costs.append(float(_operations(passes) if on_meta else min(_seconds(passes) for _ in range(_REPEATS))))
        if isinstance(passes.out, dict):
            received |= passes.out
    chain.zero_grad()
    return costs


class _Passes:
    """Forward and backward of a span; what it gave is kept."""

    def __init__(self, chain: Linked, span: range, given: Given, received: Mapping[Edge, Value]) -> None:
        self._how = chain, span, given, received
        self.out: Any = None

    def __call__(self) -> None:
        chain, span, given, received = self._how
        self.out = chain.compute(span, given, received)
        outputs = [each for each in _tensors(self.out) if each.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])


def _operations(passes: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        passes()
    total: int = counter.get_total_flops()
    return total


def _seconds(passes: Callable[[], None]) -> float:
    start = time.perf_counter()
    passes()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _leaf(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(each.detach().requires_grad_(each.requires_grad) for each in value)
    return value.detach().requires_grad_(value.requires_grad)


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, Mapping) else out
    return [each for part in parts for each in _tensors(part)]


def _parameters(chain: Linked, names: Sequence[str]) -> list[Tensor]:
    found: list[Tensor] = []
    for name in names:
        owner, _, last = name.rpartition(".")
        part = getattr(chain.get_submodule(owner), last)
        found += [part] if isinstance(part, Tensor) else list(part.parameters())
    return found


def _by_counts(counts: Sequence[int], stages: int, links: int, name: str) -> list[range]:
    wrong = [each for each in counts if not isinstance(each, Integral) or each < 1]
    if len(counts) != stages or wrong or sum(counts) != links:
        raise ValueError(
            f"balance={list(counts)} for {stages} stages of {name}: it says how many links each stage gets, each at "
            f"least 1, {links} in all"
        )
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _name(model: nn.Module) -> str:
    return type(model).__name__
