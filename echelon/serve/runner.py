"""The model and its cache on this rank: computes the parts of a step, and gives the logits of those that want them.

With tensor parallelism every rank has a runner over its shard of the model. The first one tells the others what to
compute, by one broadcast a step, and alone gets the logits; the others `follow`. A rank that waits for a broadcast
keeps a core busy, as MPI does; so when there is nothing to do for a while the others rest, waiting at the job's store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.torch_compat import default_store
from echelon.serve import fixed, memory
from echelon.serve.attention import PagedAttention, Part, plan

_END, _STEP, _REST = range(3)
_LONG = timedelta(days=365)
_FIRST = 512  # numbers that the first broadcast of a step holds; most steps need no second


class Runner:
    """`pages` of `page_size` tokens for each layer; `group` has the ranks that share the model."""

    def __init__(
        self,
        model: Any,
        *,
        pages: int,
        page_size: int,
        reproducible: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self._page_size, self._reproducible = page_size, reproducible
        self._group = group if group is not None and group.size() > 1 else None
        self._rests, self._is_resting = 0, False
        self._layers = [
            PagedAttention(
                (pages, page_size, memory.kv_heads(block.attention), block.attention.head_dim),
                model.norm.weight,
                reproducible,
            )
            for block in model.blocks
        ]
        for block, layer in zip(model.blocks, self._layers, strict=True):
            block.attention.attend = layer
        if reproducible:
            fixed.fix(model)

    def run(self, parts: list[Part]) -> Tensor:
        """The logits after the last tokens of those parts that want them, in their order."""
        if self._group is not None:
            self._tell(_pack(parts))
        return self._compute(parts)

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

    def follow(self) -> None:
        """On another rank than the first: compute what it computes, until it says that this is the end."""
        while (told := self._hear())[0] != _END:
            if told[0] == _REST:
                default_store().wait([_waking(told[1])], _LONG)
            else:
                self._compute(_unpack(told))

    @torch.inference_mode()
    def _compute(self, parts: list[Part]) -> Tensor:
        step = plan(parts, self._page_size, self.device, self._reproducible)
        for layer in self._layers:
            layer.step = step
        hidden_1TD = self.model(step.tokens_T.unsqueeze(0), positions_S=step.positions_T, hidden=True)
        if not len(step.last_R):
            return torch.empty(0, 0)
        logits_RV: Tensor = self.model.head(hidden_1TD[0, step.last_R])
        return logits_RV

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


def _waking(rest: int) -> str:
    """The key in the store that ends a rest."""
    return f"echelon/serve/{rest}"


def _pack(parts: list[Part]) -> list[int]:
    numbers = [_STEP, len(parts)]
    for part in parts:
        numbers += [part.start, part.is_last, len(part.tokens), len(part.pages), *part.tokens, *part.pages]
    return numbers


def _unpack(numbers: list[int]) -> list[Part]:
    parts, place = [], 2
    for _ in range(numbers[1]):
        start, is_last, tokens, pages = numbers[place : place + 4]
        middle, end = place + 4 + tokens, place + 4 + tokens + pages
        parts.append(Part(start, numbers[place + 4 : middle], numbers[middle:end], bool(is_last)))
        place = end
    return parts
