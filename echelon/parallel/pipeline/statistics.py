"""What batch normalisations remember, where a stage has two copies: as if one had seen all microbatches in their order.

While a bidirectional schedule runs, each copy only notes the statistics of its own microbatches. At the end the two
ranks tell each other theirs, and both replay all of them, in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.parallel.pipeline.mail import exchange

Place = tuple[int, int]  # a norm, by its number in the model, and a microbatch


def norms_of(model: nn.Module) -> dict[str, Any]:
    """The norms that remember, by name."""
    modules = model.named_modules()
    return {name: each for name, each in modules if isinstance(each, _BatchNorm) and each.running_mean is not None}


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Nothing is remembered in here: for what is computed a second time."""
    norms = norms_of(model).values()
    kept = [(each, each.momentum, each.num_batches_tracked.clone()) for each in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in kept:
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)


Sees = Callable[[int, int, int], bool]  # whether a rank has a norm see a microbatch


class Replay:
    """Of one rank, whose `twin` holds the same stages."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, twin: int, sees: Sees) -> None:
        self._norms, self._group, self._twin, self._sees = list(norms_of(model).values()), group, twin, sees
        self._noted: dict[Place, Tensor] = {}

    @contextmanager
    def note(self, microbatch: int) -> Iterator[None]:
        """In here one microbatch goes forward."""
        kept = [(each, each.running_mean, each.running_var, each.momentum) for each in self._norms]
        counts = [each.num_batches_tracked.clone() for each in self._norms]
        for norm in self._norms:  # so that it remembers this microbatch alone
            norm.running_mean, norm.running_var = (
                torch.zeros_like(norm.running_mean),
                torch.zeros_like(norm.running_var),
            )
            norm.momentum = 1.0
        try:
            yield
        finally:
            for number, ((norm, mean, variance, momentum), count) in enumerate(zip(kept, counts, strict=True)):
                if norm.num_batches_tracked != count:  # it was in this stage
                    self._noted[number, microbatch] = torch.stack([norm.running_mean, norm.running_var])
                norm.running_mean, norm.running_var, norm.momentum = mean, variance, momentum
                norm.num_batches_tracked.copy_(count)

    @torch.no_grad()
    def finish(self, microbatches: int) -> None:
        """At the end of a run, on both ranks."""
        if not self._norms:
            return
        mine = self._noted
        places = [(norm, each) for norm in range(len(self._norms)) for each in range(microbatches)]
        theirs = {place: torch.empty_like(self._like(place)) for place in places if place not in mine}
        sent = [(mine[place], self._twin) for place in places if place in mine and not self._sees(self._twin, *place)]
        exchange(self._group, sent, [(each, self._twin) for each in theirs.values()])
        self._replay(mine | theirs, microbatches)
        self._noted = {}

    def _like(self, place: Place) -> Tensor:
        norm = self._norms[place[0]]
        return torch.stack([norm.running_mean, norm.running_var])

    def _replay(self, seen: Mapping[Place, Tensor], microbatches: int) -> None:
        for number, norm in enumerate(self._norms):
            for microbatch in range(microbatches):
                norm.num_batches_tracked += 1
                momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
                for running, new in zip((norm.running_mean, norm.running_var), seen[number, microbatch], strict=True):
                    running.copy_((1 - momentum) * running + momentum * new)
