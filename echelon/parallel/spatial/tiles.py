"""A tile of an image, which to a model looks like the whole of it: same shape, same operations, exact results.

A `Tile` is a tensor of this rank's rows and columns, that knows of which whole. What is computed of each pixel alone is
computed as ever; the operations that look further know how (operations.py); what neither holds for is an error, which
names the module that asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.parallel.spatial.cut import bounds

AXES = (2, 3)  # of a batch of images with channels


class SpatialError(ValueError):
    """What cannot be tiled: which module, what it asked for, and why."""


@dataclass(frozen=True)
class Ground:
    """The tiles of a whole, as ranks: a group along each axis, one of all, and one over whose images BatchNorm's
    statistics are taken.
    """

    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]  # None: the axis is not cut
    everyone: dist.ProcessGroup
    statistics: dist.ProcessGroup

    def tiles(self, axis: int) -> int:
        group = self.groups[axis]
        return 1 if group is None else group.size()

    def here(self, axis: int, length: int) -> range:
        """This rank's rows, or columns."""
        group = self.groups[axis]
        return range(length) if group is None else bounds(length, group.size())[group.rank()]


@dataclass(frozen=True)
class Whole:
    """What a tile is a part of: height and width, and who has the rest; and whether a model has returned it."""

    sizes: tuple[int, int]
    ground: Ground
    is_outside: bool = False

    def resized(self, *sizes: int) -> Whole:
        height, width = sizes
        return replace(self, sizes=(height, width))

    @property
    def here(self) -> tuple[range, range]:
        return self.ground.here(0, self.sizes[0]), self.ground.here(1, self.sizes[1])


class Tile(Tensor):
    whole: Whole

    @staticmethod
    def of(local: Tensor, whole: Whole) -> Tile:
        """The tile that is here, of a whole."""
        expected = tuple(len(rows) for rows in whole.here)
        if local.dim() != 4 or tuple(local.shape[2:]) != expected:
            raise SpatialError(
                f"a tile of {list(local.shape)}, where {list(whole.sizes)} are cut so that this rank has "
                f"{list(expected)}: images with channels are cut along their last two dimensions"
            )
        tile = local.as_subclass(Tile)
        tile.whole = whole
        return tile

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        from echelon.parallel.spatial import operations

        return operations.call(function, arguments, named or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        rows, columns = self.whole.here
        return f"Tile(rows {rows.start}:{rows.stop}, columns {columns.start}:{columns.stop} of {self.whole.sizes})"


def plain(x: Any) -> Any:
    """A tile as an ordinary tensor, and everything else as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, Tile) else x


class OnlyPointwise(TorchDispatchMode):
    """Refuses what looks at more than one pixel at a time."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = str(function.overloadpacket)
        if torch.Tag.pointwise not in function.tags and name not in _HARMLESS:
            self._refuse(name)
        return function(*arguments, **(named or {}))


_NEW = ("clone", "detach", "_to_copy", "alias", "empty_like", "zeros_like", "ones_like")
_UNTAGGED = ("hardswish", "hardswish_", "_prelu_kernel")  # pointwise, though PyTorch does not say so
_HARMLESS = {f"aten.{name}" for name in (*_NEW, *_UNTAGGED)}
