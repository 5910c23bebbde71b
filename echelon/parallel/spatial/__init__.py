"""Spatial parallelism: images too large for one device, cut into tiles, one a rank; exact, forward and backward.

    model = spatial.tile(model, grid.mesh("sp"))
    loss = F.cross_entropy(model(images), labels)    # on all ranks, with the same images or each with its own tile
    loss.backward()                                  # gradients of weights are this rank's share: they add up

A model computes tiles as it computes whole images: nothing in it is changed. What flows through it is a `Tile` (see
tiles.py), whose convolutions, poolings, norms and the like look beyond its borders (operations.py, exchange.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from echelon.comm.torch_compat import fold
from echelon.parallel.spatial import norms, operations, resize, windows  # noqa: F401 (they enter what they can do)
from echelon.parallel.spatial.exchange import shared
from echelon.parallel.spatial.tiles import Ground, SpatialError, Tile, Whole, plain
from echelon.parallel.spatial.wholes import gathered as gather

__all__ = ["SpatialError", "Tile", "cut", "cut_images", "gather", "leaving", "name_modules", "on_ground", "tile"]

ModelType = TypeVar("ModelType", bound=nn.Module)


def tile(model: ModelType, mesh: DeviceMesh, statistics: dist.ProcessGroup | None = None) -> ModelType:
    """Let a model compute tiles: rows over a mesh of one dimension, rows and columns over one of two.

    Its first argument is then whole images, of which each rank uses its tile, or a `Tile`; and it returns what all
    ranks have alike, or the tiles of an image. `statistics` has the ranks whose images BatchNorm averages over: those
    of the mesh, unless there is data parallelism, too.
    """
    return on_ground(model, ground_of(mesh, statistics))


def on_ground(model: ModelType, ground: Ground) -> ModelType:
    """As `tile`."""
    name_modules(model)
    model.register_forward_pre_hook(_Cutting(ground), with_kwargs=True, prepend=True)
    model.register_forward_hook(lambda _, __, out: leaving(out, ground))
    return model


def name_modules(model: nn.Module) -> None:
    """Let errors say which module asked for what cannot be tiled."""
    for name, module in model.named_modules():
        path = f"{name} ({type(module).__name__})" if name else type(module).__name__
        module.register_forward_pre_hook(_Entering(path))
        module.register_forward_hook(_left)


def ground_of(mesh: DeviceMesh, statistics: dist.ProcessGroup | None = None) -> Ground:
    if mesh.ndim > 2:
        raise SpatialError(f"images have rows and columns; the mesh has {mesh.ndim} dimensions: make it one or two")
    groups = [mesh.get_group(dim) if mesh.size(dim) > 1 else None for dim in range(mesh.ndim)]
    everyone = mesh.get_group() if mesh.ndim == 1 else fold(mesh, "tiles").get_group()
    rows, columns = [*groups, None][:2]
    return Ground((rows, columns), everyone, statistics or everyone)


def cut(images: Tensor, mesh: DeviceMesh | Ground) -> Tile:
    """This rank's tile of images that it has as a whole."""
    ground = mesh if isinstance(mesh, Ground) else ground_of(mesh)
    height, width = images.shape[-2:]
    whole = Whole((height, width), ground)
    rows, columns = whole.here
    return Tile.of(images[..., rows.start : rows.stop, columns.start : columns.stop], whole)


class _Entering:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any) -> None:
        operations.entered(self._name)


def _left(*_: Any) -> None:
    operations.left()


class _Cutting:
    """What comes into a model: tiles on the model's ground, made of whole images if need be."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if arguments:
            return tuple(cut_images(arguments, self._ground)), named
        return arguments, cut_images(named, self._ground)


def cut_images(given: Any, ground: Ground) -> Any:
    """A model's arguments, by name or in order, with its images as this rank's tile: what is named `…_BCHW`, or else
    the first.
    """
    operations.forget()
    names: list[Any] = list(given) if isinstance(given, Mapping) else [*range(len(given))]
    name = next((each for each in names if str(each).endswith("_BCHW")), names[0])
    first = given[name]
    if isinstance(first, Tile):  # the model says over whom its statistics are, whoever made the tile
        images: Any = Tile.of(plain(first), Whole(first.whole.sizes, ground))
    else:
        images = cut(first, ground) if isinstance(first, Tensor) else first
    return {**given, name: images} if isinstance(given, Mapping) else [images, *given[1:]]


def leaving(out: Any, ground: Ground) -> Any:
    """What a model returns: see exchange.py."""
    if isinstance(out, Tile):
        return Tile.of(plain(out), Whole(out.whole.sizes, ground, is_outside=True))
    return shared(out, ground.everyone.size()) if isinstance(out, Tensor) else out
