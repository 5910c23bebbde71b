"""Dropout that every layout of ranks draws alike.

Whether an element is dropped is a hash of the seed, the step, the module's number, the sample, the position in the
sequence and the feature. So a rank that holds a part of the batch or of the sequence drops what a single process would
drop there, and recomputation drops it again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.models import counter


class Place:
    """Where a model is, for all its dropouts. Whoever trains sets `seed` and `step`; the model sets the rest."""

    def __init__(self, seed: int = 0, step: int = 0) -> None:
        self.seed, self.step = seed, step
        self.samples_B: Tensor | None = None  # the samples' numbers in the whole batch; None: 0, 1, …
        self.positions_S: Tensor | None = None  # the tokens' positions in the whole sequence; None: 0, 1, …
        self.part = 0, 1  # (index, count): the slice of this sequence that regions split by sequence hold

    @property
    def seed(self) -> int:
        return self._seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._seed = value
        self.seed_tensor = counter.as_tensor(value ^ (value >> 32) * 0x9E3779B1)  # all of its bits count

    @property
    def step(self) -> int:
        return int(self.step_tensor)

    @step.setter
    def step(self, value: int) -> None:
        """Kept as a tensor: a number would be compiled into a graph, and each step need its own."""
        self.step_tensor = counter.as_tensor(value)

    def move(self, samples_B: Tensor | None, positions_S: Tensor | None) -> None:
        """Say of which samples and positions the next computation is."""
        self.samples_B, self.positions_S = samples_B, positions_S

    def samples(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device) if self.samples_B is None else self.samples_B

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Those of `length` tokens: all, or this rank's slice of them."""
        index, count = self.part
        if self.positions_S is None:
            return torch.arange(index * length, (index + 1) * length, device=device)
        if len(self.positions_S) == length:
            return self.positions_S
        return torch.tensor_split(self.positions_S, count)[index]


class Dropout(nn.Module):
    """Of hidden states; `connect` gives it its number and the model's place."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"a dropout of {p} is not a probability below 1")
        self.p = p
        self.number = 0
        self.place = Place()

    @property
    def number(self) -> int:
        return self._number

    @number.setter
    def number(self, value: int) -> None:
        self._number, self.key = value, counter.number_key(value)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x_BSD
        batch, length, dim = x_BSD.shape
        samples_B1 = self.place.samples(batch, x_BSD.device)[:, None]
        positions_S = self.place.positions(length, x_BSD.device)
        return self.drop(x_BSD, samples_B1, positions_S, columns=torch.arange(dim, device=x_BSD.device))

    def weights(self, weights_BHST: Tensor) -> Tensor:
        """The same for attention's weights of T keys for S queries."""
        batch, heads, queries, keys = weights_BHST.shape
        device = weights_BHST.device
        samples_B11 = self.place.samples(batch, device)[:, None, None]
        heads_H1 = torch.arange(heads, device=device)[:, None]
        positions_S = self.place.positions(queries, device)
        return self.drop(weights_BHST, samples_B11, heads_H1, positions_S, columns=self.place.positions(keys, device))

    def drop(self, x: Tensor, *places: Tensor, columns: Tensor) -> Tensor:
        place = self.place
        row = counter.rows(self.key, places[0], place.seed_tensor, place.step_tensor, *places[1:])
        bits = counter.elements(self.key, row, columns)
        keep = bits >= round(self.p * 2**32) - 2**31
        return torch.where(keep, x / (1 - self.p), 0)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def connect(model: nn.Module, place: Place) -> None:
    """Give each dropout of a whole model its number, and the place that they share."""
    for number, module in enumerate(module for module in model.modules() if isinstance(module, Dropout)):
        module.number, module.place = number, place
