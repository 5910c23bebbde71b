"""The loss on samples that were held out: the same in every layout, as the training loss is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from echelon.models.presets import takes_images
from echelon.parallel.layout import Grid
from echelon.parallel.loss import IGNORED
from echelon.parallel.spatial.tiles import Tile, plain
from echelon.train.build import in_dtype
from echelon.train.checks import micro_batch
from echelon.train.config import Config
from echelon.train.data import Loader, Source
from echelon.train.data.source import TiledSource
from echelon.train.passes import Passes, has_own_targets, targets_of


@dataclass(frozen=True)
class _First:
    """The first samples of a source."""

    source: Source
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def side(self) -> int:
        """Of a source that can be read by tile."""
        return cast(TiledSource, self.source).side

    def batch(self, numbers: NDArray[np.int64], epochs: NDArray[np.int64], **tile: Any) -> dict[str, Tensor]:
        return self.source.batch(numbers, epochs, **tile)


class Evaluation:
    """Of the first `eval_samples` of the samples that were held out, in batches as training's."""

    def __init__(self, config: Config, source: Source | None, grid: Grid, **how: Any) -> None:
        batch, samples = config.train.batch, 0 if source is None else min(len(source), config.train.eval_samples)
        self._places = range(0, samples, batch)  # the last batch may reach beyond the samples
        self._config, self._grid = config, grid
        self._counts_hits = takes_images(config.architecture) and grid.layout.tp == 1
        self._tiles = math.prod(grid.layout.grids[-1].tiles)
        if source is not None and samples:
            self._loader = Loader(
                _First(source, samples), None, grid, batch=batch, micro_batch=micro_batch(config), **how
            )

    @torch.no_grad()
    def run(self, model: Any, passes: Passes) -> dict[str, float]:
        """The mean loss and, of images, the share that was classified rightly; nothing, if nothing was held out."""
        if not self._places:
            return {}
        device = next(model.parameters()).device
        loss, count, hits = torch.zeros(3, dtype=torch.float64, device=device)
        model.eval()
        for place in self._places:
            batch = [in_dtype(given, self._config) for given in self._loader.load(place)]
            for given, ended in zip(batch, passes.forward(batch), strict=True):
                if ended is not None:
                    loss += ended / self._tiles
                    counted = (targets_of(given) != IGNORED).sum()
                    count += counted if has_own_targets(given) else counted / self._tiles
            self._loader.read_ahead()
            if self._counts_hits:
                images = [{name: each for name, each in given.items() if "targets" not in name} for given in batch]
                for given, classes in zip(batch, passes.forward(images), strict=True):
                    if classes is not None:
                        hits += self._hits(classes, targets_of(given))
        model.train()
        total = torch.stack([loss, count, hits])  # ranks of tp have the same, of all three; those of sp their shares
        dist.all_reduce(total, group=self._grid.mesh("world").get_group())
        found = {"loss": (total[0] / total[1]).item()}
        return found | ({"accuracy": (total[2] / total[1]).item()} if self._counts_hits else {})

    def _hits(self, classes: Any, targets: Tensor) -> Tensor:
        """This rank's share of what was classified rightly: of its tile, or of what all ranks with tiles have alike."""
        if targets.dim() == 1:
            found: Tensor = (classes.argmax(-1) == targets).sum()
            return found / self._tiles
        if isinstance(classes, Tile) and tuple(targets.shape[-2:]) == classes.whole.sizes:
            rows, columns = classes.whole.here
            targets = targets[:, rows.start : rows.stop, columns.start : columns.stop]
        own: Tensor = plain(classes)
        return (own.argmax(1) == targets).sum()

    def close(self) -> None:
        if hasattr(self, "_loader"):
            self._loader.close()
