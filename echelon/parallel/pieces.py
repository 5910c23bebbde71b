"""What of each parameter this rank updates, whatever the strategy.

The whole of what it holds (plain models, and stage 0), the part of it that lies in this rank's part of a flat bucket
(stages 1 and 2), or its shard (stage 3). Every rank has a piece of every parameter, empty where it has nothing to
update, so that an optimizer's groups are the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.comm.torch_compat import local_tensor
from echelon.models.chain import apart_of
from echelon.parallel.buckets import Bucket, take_gradient
from echelon.parallel.reduce import Reducer


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
    ranks = max((each.device_mesh.size() for each in model.parameters() if isinstance(each, DTensor)), default=1)
    if reducer is None or reducer.stage == 0:
        found = list(_whole(model, ranks, reducer))
    else:
        found = [piece for bucket in reducer.buckets for piece in _parts(bucket, reducer, ranks)]
    apart = apart_of(model)
    return [
        replace(piece, copies=piece.copies * len(apart[piece.name].ranks)) if piece.name in apart else piece
        for piece in found
    ]


def reducer_of(model: nn.Module) -> Reducer | None:
    """What sums this model's gradients, unless FSDP2 does, or nobody."""
    return getattr(model, "gradient_reducer", None)


def _whole(model: nn.Module, ranks: int, reducer: Reducer | None) -> Iterator[Piece]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            replicas = 1 if reducer is None else reducer.mesh_of(name).size()
            memory = local_tensor(parameter).detach()
            yield Piece(name, 0, memory, replicas * _copies(parameter, ranks), partial(take_gradient, parameter))


def _parts(bucket: Bucket, reducer: Reducer, ranks: int) -> Iterator[Piece]:
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
        yield Piece(name, offset, mine[where], _copies(parameter, ranks), take)


def _take_part(bucket: Bucket, where: slice, last: bool) -> Tensor | None:
    gradient = None if bucket.reduced is None else bucket.reduced[where]
    if last:
        bucket.reduced = None
    return gradient


def _copies(parameter: nn.Parameter, ranks: int) -> int:
    """How many of the ranks that the model's parameters are split over hold the same of this one: all of them, if it
    is a plain tensor in a model whose other parameters are split.
    """
    if not isinstance(parameter, DTensor):
        return ranks
    mesh = parameter.device_mesh
    replicated = [mesh.size(dim) for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return math.prod(replicated) * ranks // mesh.size()
