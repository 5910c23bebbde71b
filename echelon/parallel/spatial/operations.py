"""What can be done with tiles: a table of functions that look beyond a pixel, and everything that does not.

The functions are in windows.py, resize.py, norms.py and wholes.py; each is exact, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from echelon.parallel.spatial.tiles import AXES, OnlyPointwise, SpatialError, Tile, Whole, plain

Handler = TypeVar("Handler", bound=Callable[..., Any])
TABLE: dict[Any, Callable[..., Any]] = {}
_module: list[str] = []  # the names of those that are being computed, the innermost last


def tiled(*functions: Any) -> Callable[[Handler], Handler]:
    """Let a handler do what these functions do, for tiles."""

    def enter(handler: Handler) -> Handler:
        TABLE.update(dict.fromkeys(functions, handler))
        return handler

    return enter


def call(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if function in TABLE:
        try:
            return TABLE[function](*arguments, **named)
        except SpatialError:
            raise
        except ValueError as error:
            raise SpatialError(f"{_where()}{error}") from None
    if function in _ABOUT:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **named)
    return pointwise(function, arguments, named)


def refuse(what: str, why: str) -> NoReturn:
    raise SpatialError(f"{_where()}{what} cannot be tiled: {why}")


def _where() -> str:
    return f"{_module[-1]}: " if _module else ""


def pointwise(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Of each pixel alone. What is no tile must be the same for all pixels, or is cut as they are."""
    name = getattr(function, "__name__", str(function))
    tiles = [each for each in (*arguments, *named.values()) if isinstance(each, Tile)]
    if not tiles:
        refuse(name, "tiles are inside one of its arguments")
    whole = tiles[0].whole
    if any(each.whole != whole for each in tiles):
        refuse(name, f"its arguments are tiles of images of {[each.whole.sizes for each in tiles]}")
    here = [fitting(each, whole, name) for each in arguments]
    here_named = {key: fitting(each, whole, name) for key, each in named.items()}
    with torch._C.DisableTorchFunctionSubclass(), OnlyPointwise(_refusal(name)):
        out = function(*here, **here_named)
    return _again(
        out, whole, [(tile, local) for tile, local in zip(arguments, here, strict=True) if isinstance(tile, Tile)]
    )


def _refusal(asked: str) -> Callable[[str], None]:
    return lambda operation: refuse(asked, f"it looks at more than one pixel ({operation}), and there is no way for it")


def fitting(x: Any, whole: Whole, name: str) -> Any:
    """This rank's part of what is combined with a tile."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, Tile):
        return plain(x)
    for axis, length in zip(AXES, whole.sizes, strict=True):
        dim = x.dim() - 4 + axis
        if dim < 0 or x.shape[dim] == 1:
            continue
        if x.shape[dim] != length:
            refuse(name, f"a tensor of {list(x.shape)} fits no image of {list(whole.sizes)}")
        own = whole.ground.here(axis - 2, length)
        x = x.narrow(dim, own.start, len(own))
    return x


def _again(out: Any, whole: Whole, given: Sequence[tuple[Tile, Tensor]]) -> Any:
    """What came out, as tiles: one that was changed in place is the one that was given."""
    for tile, local in given:
        if out is local:
            return tile
    if isinstance(out, Tensor):
        return Tile.of(out, whole)
    if isinstance(out, tuple | list):
        return type(out)(_again(each, whole, given) for each in out)
    return out


_ABOUT = {
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.requires_grad_,
    Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.dim,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.element_size,
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.backward,
}


@tiled(Tensor.shape.__get__)  # type: ignore[attr-defined]
def shape(x: Tile) -> torch.Size:
    """Of the whole."""
    return torch.Size([*plain(x).shape[:2], *x.whole.sizes])


@tiled(Tensor.size)
def _size(x: Tile, dim: int | None = None) -> Any:
    return shape(x) if dim is None else shape(x)[dim]


@tiled(Tensor.numel, torch.numel)
def _numel(x: Tile) -> int:
    return math.prod(shape(x))


def pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


def entered(name: str) -> None:
    _module.append(name)


def left() -> None:
    if _module:
        _module.pop()


def forget() -> None:
    _module.clear()
