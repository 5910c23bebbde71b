"""Parameters that links on several ranks share, as a tied embedding and head do: their gradients are summed.

Each rank has its own copy, and of its gradient, after the sum over the data ranks, what it updates. The copies are
equal, and so are the ways in which data strategies cut them; so ranks send each other their parts and add all of them
in the order of the ranks, and the copies stay equal to the last bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.comm.torch_compat import local_tensor
from echelon.models.chain import Linked
from echelon.models.held import plain_name
from echelon.parallel.pieces import reducer_of
from echelon.parallel.pipeline.mail import exchange


class Ties:
    def __init__(self, model: Linked, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._me = dist.get_rank(group)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Over the ranks of the pipeline that share a parameter; called by all of them."""
        for name, apart in sorted(self._model.apart.items(), key=lambda item: item[1].name):
            mine = self._gradient(name)
            others = [rank for rank in apart.ranks if rank != self._me]
            arriving = {rank: torch.empty_like(mine) for rank in others}
            exchange(self._group, [(mine, rank) for rank in others], [(each, rank) for rank, each in arriving.items()])
            parts = arriving | {self._me: mine.clone()}
            mine.zero_()
            for rank in apart.ranks:
                mine += parts[rank]

    def _gradient(self, name: str) -> Tensor:
        """Of a parameter, what this rank updates with."""
        reducer = reducer_of(self._model)
        parameters = {plain_name(each): of for each, of in self._model.named_parameters()}
        parameter = parameters[name]
        if reducer is not None and reducer.stage > 0:
            bucket = next(each for each in reducer.buckets if parameter in each.places)
            if bucket.reduced is None:
                bucket.reduced = torch.zeros_like(reducer.part(bucket.empty()))
            return bucket.reduced
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient: Tensor = local_tensor(parameter.grad)
        return gradient
