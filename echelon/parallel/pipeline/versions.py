"""Several versions of a stage's weights at a time: what PipeDream's microbatches were begun with, they end with.

A version is a set of leaves that share the parameters' memory. If no microbatch needs it any more, an update changes
that memory where it is; else the parameters get new memory first, and the version keeps the old one. So there are as
many copies as there are versions in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from echelon.parallel.optimizer import Optimizer


class Versions:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._users: Counter[int] = Counter()
        self._newest = 0
        self.most = 1  # copies of the weights that there were at a time

    def begin(self, users: Iterable[int]) -> None:
        """At the start of a run: the version that each microbatch will use, of each stage."""
        self._leaves, self._users, self._newest = {}, Counter(users), 0

    def use(self, version: int) -> dict[str, Tensor]:
        """The weights of a version, for a microbatch that begins with it."""
        if version not in self._leaves:
            assert version == self._newest, f"version {version} is not there: the newest is {self._newest}"
            self._leaves[version] = {
                name: parameter.data.requires_grad_(parameter.requires_grad)
                for name, parameter in self._model.named_parameters()
            }
        return self._leaves[version]

    def release(self, version: int) -> None:
        """A microbatch has ended: its gradients go to the parameters."""
        for name, parameter in self._model.named_parameters():
            leaf = self._leaves[version][name]
            if leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad + leaf.grad
                leaf.grad = None
        self._users[version] -= 1
        if not self._users[version]:
            del self._leaves[version]

    @torch.no_grad()
    def update(self, optimizer: Optimizer) -> float:
        """Make the next version with the gradients that the parameters have; returns their norm."""
        if self._users[self._newest]:
            self.use(self._newest)
            parameters = dict(self._model.named_parameters())
            for piece in optimizer.pieces:
                piece.memory.data = piece.memory.data.clone()
                parameters[piece.name].data = piece.memory.data
        norm = optimizer.step()
        self._newest += 1
        self.most = max(self.most, len({*self._leaves, self._newest}))
        return norm
