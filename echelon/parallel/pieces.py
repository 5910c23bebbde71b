"""What of each parameter this rank updates, whatever the strategy.

The whole of what it holds (plain models, and stage 0), the part of it that lies in this rank's part of a flat bucket
(stages 1 and 2), or its shard (stage 3). Every rank has a piece of every parameter, empty where it has nothing to
update, so that an optimizer's groups are the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from echelon.comm.torch_compat import local_tensor
from echelon.parallel.buckets import Bucket
from echelon.parallel.reduce import Reducer

COMPUTES_IN = "computes_in"  # a mark on models that do so in another dtype than their parameters'


@dataclass(frozen=True)
class Piece:
    name: str  # the parameter's
    offset: int  # where it begins in what this rank holds of the parameter, flattened
    memory: Tensor  # the parameter's own
    copies: int  # how many ranks of the world update the same
    take_gradient: Callable[[], Tensor | None]  # and leave none behind


def pieces(model: nn.Module) -> list[Piece]:
    """A model's pieces, of trainable parameters alone, in the same order on all ranks."""
    reducer = reducer_of(model)
    if reducer is None or reducer.stage == 0:
        return list(_whole(model, reducer.ranks if reducer else 1))
    return [piece for bucket in reducer.buckets for piece in _parts(model, bucket, reducer)]


def reducer_of(model: nn.Module) -> Reducer | None:
    """What sums this model's gradients, unless FSDP2 does, or nobody."""
    return getattr(model, "reducer", None)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def _whole(model: nn.Module, copies: int) -> Iterator[Piece]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            memory = local_tensor(parameter).detach()
            yield Piece(name, 0, memory, copies * _copies(model, parameter), partial(_take, parameter))


def _take(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    parameter.grad = None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    local: Tensor | None = local_tensor(gradient)
    return local


def _parts(model: nn.Module, bucket: Bucket, reducer: Reducer) -> Iterator[Piece]:
    assert bucket.weights is not None
    mine = reducer.part(bucket.weights)
    start = reducer.rank * len(mine)
    *_, last = bucket.parameters
    for name, parameter in bucket.parameters.items():
        place, count = bucket.places[parameter], local_tensor(parameter).numel()
        low = min(max(place, start), start + len(mine))
        high = max(low, min(place + count, start + len(mine)))
        where = slice(low - start, high - start)
        offset = min(max(low - place, 0), count)
        take = partial(_take_part, bucket, where, name == last)
        yield Piece(name, offset, mine[where], _copies(model, parameter), take)


def _take_part(bucket: Bucket, where: slice, last: bool) -> Tensor | None:
    gradient = None if bucket.reduced is None else bucket.reduced[where]
    if last:
        bucket.reduced = None
    return gradient


def _copies(model: nn.Module, parameter: nn.Parameter) -> int:
    """How many ranks of the meshes that the model's parameters know hold the same of this one."""
    known = [other.device_mesh.size() for other in model.parameters() if isinstance(other, DTensor)]
    if not isinstance(parameter, DTensor):
        return max(known, default=1)
    mesh = parameter.device_mesh
    replicated = [mesh.size(dim) for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return math.prod(replicated) * max(known) // mesh.size()
