"""A rank's view of a layout without ranks: as much of a grid as a loader looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.parallel.layout import Layout


@dataclass(frozen=True)
class Mesh:
    ranks: int
    rank: int

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


@dataclass(frozen=True)
class Grid:
    layout: Layout
    rank: int

    def mesh(self, view: str) -> Mesh:
        return Mesh(getattr(self.layout, view), self.layout.coordinates(self.rank)[view])


def grids(**degrees: int) -> list[Any]:
    """What each rank of a layout sees."""
    layout = Layout(**degrees)
    return [Grid(layout, rank) for rank in range(layout.size)]


@dataclass(frozen=True)
class Counted:
    """Samples that tell who they are: token j of sample i in epoch e is 10,000·e + 100·i + j."""

    samples: int
    length: int

    def __len__(self) -> int:
        return self.samples

    def batch(self, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> dict[str, Tensor]:
        tokens = torch.from_numpy(10_000 * epochs + 100 * numbers)[:, None] + torch.arange(self.length)
        return {"tokens_BS": tokens, "targets_BS": tokens + 1}
