"""The model and its cache on this rank: computes the parts of a step, and draws the next tokens of those that want one.

With tensor parallelism every rank has a runner over its shard of the model. The first one tells the others what to
compute, by one broadcast a step, and alone gets the logits, and draws; the others `follow`. A rank that waits for a
broadcast keeps a core busy, as MPI does; so when there is nothing to do for a while the others rest, waiting at the
job's store.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from echelon.comm.torch_compat import default_store
from echelon.serve import memory, way
from echelon.serve.rehearsal import USUAL, rehearse
from echelon.serve.sample import Chosen, Draws
from echelon.serve.settings import Settings
from echelon.serve.step import Part, Shape, pack, unpack

_END, _STEP, _REST = range(3)
_LONG = timedelta(days=365)
_FREEZING, _undisturbed = threading.Lock(), set[object]()  # of the process, as Python's collector is
_FIRST = 512  # numbers that the first broadcast of a step holds; most steps need no second


class Runner:
    """`shape` is that of the cache; `group` has the ranks that share the model."""

    def __init__(self, model: Any, shape: Shape, settings: Settings, *, group: dist.ProcessGroup | None = None) -> None:
        model.eval()
        self.choice = way.choose(model, settings)
        self._group = group if group is not None and group.size() > 1 else None
        self._rests, self._is_resting = 0, False
        self._on_device = partial(torch.cuda.device_of, next(model.parameters()))
        lower = "--cache-gib" if settings.cache_gib else "--token-budget or --most-running"
        with (
            memory.enough_for(f"the cache beside the model: lower {lower}, or serve over more ranks"),
            self._on_device(),
        ):
            self._way = way.build(model, shape, settings)
            if self.choice.fused:
                most = memory.context(model, settings, shape.pages)
                rehearse(self._way, shape, settings.token_budget, most, group is None or group.rank() == 0)

    @torch.inference_mode()
    def launch(self, parts: list[Part], draws: Draws) -> Chosen:
        """Begin a step: see `way.Way`."""
        if self._group is not None:
            self._tell([_STEP, *pack(parts)])
        with self._on_device():
            chosen = self._way.launch(parts, draws)
        assert chosen is not None
        return chosen

    def warm(self) -> None:
        """Once, in the thread that will launch: CUDA's libraries keep what they need for each thread by itself."""
        if self.choice.fused:
            self.launch([Part(0, 0, [0], 0, [0], True)], Draws([USUAL])).result()

    def rest(self) -> None:
        """There is nothing to do for now: the other ranks need not look for it all the time."""
        if self._group is not None and not self._is_resting:
            default_store().delete_key(_waking(self._rests))  # of the last rest, which all have ended
            self._rests += 1
            self._tell([_REST, self._rests])
            self._is_resting = True

    def end(self) -> None:
        """Tell the other ranks to return."""
        if self._group is not None:
            self._tell([_END])

    @torch.inference_mode()
    def follow(self) -> None:
        """On another rank than the first: compute what it computes, until it says that this is the end."""
        with undisturbed():
            while (told := self._hear())[0] != _END:
                if told[0] == _REST:
                    default_store().wait([_waking(told[1])], _LONG)
                else:
                    with self._on_device():
                        self._way.launch(unpack(told[1:]), None)

    def _tell(self, numbers: list[int]) -> None:
        if self._is_resting:
            default_store().set(_waking(self._rests), "")
            self._is_resting = False
        first = [len(numbers), *numbers[: _FIRST - 1]]
        packet = torch.tensor(first + [0] * (_FIRST - len(first)))
        dist.broadcast(packet, group=self._group, group_src=0)
        if rest := numbers[_FIRST - 1 :]:
            dist.broadcast(torch.tensor(rest), group=self._group, group_src=0)

    def _hear(self) -> list[int]:
        packet = torch.empty(_FIRST, dtype=torch.int64)
        dist.broadcast(packet, group=self._group, group_src=0)
        count, *numbers = packet.tolist()
        if count < _FIRST:
            return numbers[:count]
        rest = torch.empty(count - (_FIRST - 1), dtype=torch.int64)
        dist.broadcast(rest, group=self._group, group_src=0)
        return numbers + rest.tolist()


@contextmanager
def undisturbed() -> Iterator[None]:
    """For as long as steps are taken. Now and then Python looks for garbage among all objects that there are, which
    takes as long as many steps, and everybody waits. So it looks only among those that came since; what is older and
    becomes garbage in a circle stays until the last engine of the process ends.
    """
    me = object()
    gc.collect()  # which may end other engines
    with _FREEZING:
        _undisturbed.add(me)
        gc.freeze()
    try:
        yield
    except BaseException:
        gc.unfreeze()  # who fails is in a circle with its failure, and its memory is wanted
        raise
    finally:
        with _FREEZING:
            _undisturbed.discard(me)
            if not _undisturbed:
                gc.unfreeze()


def _waking(rest: int) -> str:
    """The key in the store that ends a rest."""
    return f"echelon/serve/{rest}"
