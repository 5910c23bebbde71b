"""Which part of a whole tensor this rank holds, and how a rank fills its part alone.

A parameter is a plain tensor (all of it is here) or a DTensor; its part is one range in each dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from echelon.models.chain import apart_of

Part = tuple[slice, ...]

# What wrappers of blocks (recomputation, compilation) put into the names of what they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once, by the names that they have in the plain model."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name_in(model, name), tensor


def name_in(model: nn.Module, name: str) -> str:
    """The name that a tensor has in the plain, whole model: the first of them, if a link elsewhere shares it."""
    plain, apart = plain_name(name), apart_of(model)
    return apart[plain].name if plain in apart else plain


def plain_name(name: str) -> str:
    """A name without what wrappers have put into it."""
    return functools.reduce(lambda name, wrapper: name.replace(wrapper, ""), _WRAPPERS, name)


def local(tensor: Tensor) -> Tensor:
    """What lies in this process, to be written to."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def part(tensor: Tensor) -> Part:
    """The ranges of the whole that this rank holds."""
    ranges = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this rank holds nothing of a parameter that lies on {mesh}")
        for axis, dim in _in_order_of_sharding(tensor):
            start, stop = ranges[dim]
            step = math.ceil((stop - start) / mesh.size(axis))  # as torch.chunk cuts: the last ones may be short
            first = min(start + step * coordinate[axis], stop)
            ranges[dim] = first, min(first + step, stop)
        expected, held = tuple(stop - start for start, stop in ranges), tuple(tensor.to_local().shape)
        if held != expected:
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} with placements {tensor.placements} holds {held} here, "
                f"where {expected} was expected"
            )
    return tuple(slice(start, stop) for start, stop in ranges)


def _in_order_of_sharding(tensor: DTensor) -> list[tuple[int, int]]:
    """Pairs of the mesh's axis and the tensor's dimension. What FSDP shards on top of another split (a strided shard,
    in PyTorch's words) is cut after it, though its axis stands before."""
    first: list[tuple[int, Shard]] = []
    then: list[tuple[int, _StridedShard]] = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            then.append((axis, placement))
        elif isinstance(placement, Shard):
            first.append((axis, placement))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"a parameter with placement {placement} cannot be filled: redistribute it first")
    for _, strided in then:
        if strided.split_factor != math.prod(
            tensor.device_mesh.size(axis) for axis, plain in first if plain.dim == strided.dim
        ):
            raise ValueError(f"a parameter with placements {tensor.placements} is not one range of rows on each rank")
    return [(axis, plain.dim) for axis, plain in first] + [(axis, strided.dim) for axis, strided in then]
