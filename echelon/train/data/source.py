"""What a loader reads from, whatever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Source(Protocol):
    """Samples by their numbers, counted from 0."""

    def __len__(self) -> int: ...

    def batch(self, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> dict[str, Tensor]:
        """The model's arguments on the CPU, by their names; `epochs` says for each sample how often it was seen
        before, so that it is masked or cut in another way. Called from several threads.
        """
        ...


Tile = tuple[tuple[int, int], tuple[int, int]]  # which of how many along rows, and the same along columns
WHOLE: Tile = ((0, 1), (0, 1))


class TiledSource(Source, Protocol):
    """One whose images can be read by tile. Without a tile no pixels are read, and the images are there by their shape
    alone, on the meta device. Targets of each pixel are those of the tile `of_targets`.
    """

    side: int

    def batch(
        self,
        numbers: NDArray[np.int64],
        epochs: NDArray[np.int64],
        tile: Tile | None = WHOLE,
        of_targets: Tile = WHOLE,
    ) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Sources:
    """What a run trains on, and what it is evaluated on; no sample is in both."""

    train: Source
    held_out: Source | None
