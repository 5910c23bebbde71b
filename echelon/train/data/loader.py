"""What each rank gets of each step: read by the rank itself, while the step before is computed.

A step is `batch` samples that stand one after another in the order. They are taken in passes, each of `micro_batch`
samples a rank, and those of a pass are dealt to the ranks of `dp` in runs. So whatever the layout and the number of
passes, all ranks together see the samples of the step, and a sample's number in the step is its place there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.parallel import batch as batches
from echelon.parallel import sequence
from echelon.parallel.layout import Grid
from echelon.parallel.loss import IGNORED
from echelon.parallel.spatial.tiles import Tile, Whole
from echelon.parallel.tiling import Needs
from echelon.train.data.order import Order
from echelon.train.data.source import WHOLE, Source, TiledSource

Pass = dict[str, Tensor]


def reads_tiles(source: Any) -> bool:
    """Whether its images can be read by tile: `source.TiledSource`, or what stands for one."""
    return "tile" in inspect.signature(getattr(source, "source", source).batch).parameters


class Loader:
    """This rank's samples of any step; `read_ahead` reads those of the next one meanwhile, in a thread.

    Without an order samples come as they are numbered, once, as an evaluation wants them: what would stand beyond the
    last has targets that do not count.
    """

    def __init__(
        self,
        source: Source,
        order: Order | None,
        grid: Grid,
        *,
        batch: int,
        micro_batch: int = 0,
        kind: sequence.Kind = "ring",
        causal: bool = True,
        device: str | torch.device = "cpu",
        needs_of: Callable[[int], Needs] = lambda _: Needs(),
    ) -> None:
        """`needs_of` a pass says what this rank needs of its images: a source that can reads no more."""
        self._needs_of = needs_of
        self._source, self._order, self._grid, self._batch = source, order, grid, batch
        self._kind, self._causal = kind, causal
        self._device = torch.empty(0, device=device).device  # with the GPU's number
        dp = grid.mesh("dp")
        self._mine = batches.deal(batch, micro_batch, dp.size(), dp.get_local_rank())
        self._next = 0
        self._ahead: tuple[int, Future[list[Pass]]] | None = None
        self._thread = ThreadPoolExecutor(1, "read-ahead", self._begin)

    def load(self, place: int) -> list[Pass]:
        """The passes of the step whose first sample stands at `place`: the model's arguments, on the device."""
        self._next = place
        self.read_ahead()
        assert self._ahead is not None
        passes = self._ahead[1].result()
        self._next += self._batch
        return [self._on_ground(number, self._move(each)) for number, each in enumerate(passes)]

    def read_ahead(self) -> None:
        """Begin with the step after the one that was loaded. A good moment is when the device has enough to do: the
        thread takes the interpreter from whoever would give it more.
        """
        if self._ahead is None or self._ahead[0] != self._next:
            if self._ahead is not None:
                self._ahead[1].cancel()
            self._ahead = self._next, self._thread.submit(self._read, self._next)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        if self._device.type == "cuda":  # else memory would be pinned for the first GPU, by each rank
            torch.cuda.set_device(self._device)

    def _read(self, place: int) -> list[Pass]:
        passes = []
        for number, mine in enumerate(self._mine):
            given = self._samples(place + np.asarray(mine), self._tile(number)) | {"samples_B": torch.tensor(mine)}
            given |= batches.sequences(given, self._grid, kind=self._kind, causal=self._causal)
            if self._device.type == "cuda":
                given = {name: x if x.is_meta else x.contiguous().pin_memory() for name, x in given.items()}
            passes.append(given)
        return passes

    def _samples(self, places: NDArray[np.int64], tile: dict[str, Any]) -> Pass:
        if self._order is not None:
            return self._source.batch(self._order[places], self._order.epochs(places), **tile)
        end = len(self._source)
        given = self._source.batch(places.clip(max=end - 1), np.zeros_like(places), **tile)
        for name in given.keys() & {"targets_BS", "targets_B", "targets_BHW"}:
            given[name] = given[name].clone()
            given[name][torch.from_numpy(places >= end)] = IGNORED
        return given

    def _tile(self, number: int) -> dict[str, Any]:
        """Which tile of a pass's images to read, of a source that can."""
        needs = self._needs_of(number)
        if not reads_tiles(self._source):
            return {}
        groups: Any = needs.ground.groups if needs.ground is not None else (None, None)
        tile = tuple((0, 1) if group is None else (group.rank(), group.size()) for group in groups)
        return {"tile": tile if needs.images else None, "of_targets": WHOLE if needs.whole_targets else tile}

    def _on_ground(self, number: int, given: Pass) -> Pass:
        ground = self._needs_of(number).ground
        if ground is None or not reads_tiles(self._source):
            return given
        side = cast(TiledSource, self._source).side
        return given | {"images_BCHW": Tile.of(given["images_BCHW"], Whole((side, side), ground))}

    def _move(self, given: Pass) -> Pass:
        moved = {name: x if x.is_meta else x.to(self._device, non_blocking=True) for name, x in given.items()}
        if "positions_S" in given:
            moved["positions_S"] = self._positions(len(given["positions_S"]))
        return moved

    def _positions(self, count: int) -> Tensor:
        """The very tensor that attention compares with, so that it need not look into it."""
        cp = self._grid.mesh("cp")
        place = self._kind, self._causal, count * cp.size(), cp.size(), cp.get_local_rank()
        return sequence.positions(*place, self._device)
