"""What a data strategy sends in a step, from shapes alone: the payload, in bytes, of each operation over the data mesh.

With Ψ the bytes of all trainable parameters: stage 0 all-reduces Ψ; stages 1 and 2 reduce-scatter Ψ and gather Ψ;
stage 3 reduce-scatters Ψ, gathers Ψ for forward, and again for backward all but the rest's, which stays whole in
between. On top comes padding: stages 1 and 2 align each parameter to 16 bytes and each rank's part too, stage 3 (FSDP2)
cuts each parameter along its first dimension into equal shards. Not counted: the broadcast at the start, and one
number of 8 bytes that `Optimizer.step` all-reduces over the world for the norm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from echelon.comm.torch_compat import local_tensor
from echelon.parallel.buckets import aligned, lay_out, units


@dataclass(frozen=True)
class Held:
    """A parameter, or what one rank holds of it where it is split over another mesh."""

    shape: tuple[int, ...]
    element_size: int = 4  # bytes
    trainable: bool = True
    apart: str = ""  # its name, if another stage of a pipeline has it, too: then it is a bucket of its own


Units = Mapping[str, Sequence[Held]]  # as `buckets.units` names them: the blocks, and "" the rest


def held(model: nn.Module) -> dict[str, list[Held]]:
    """A model's shapes, before a data strategy is applied to it (it may be on the meta device)."""
    return {
        unit: [
            Held(tuple(local_tensor(parameter).shape), parameter.element_size(), parameter.requires_grad)
            for parameter in parameters.values()
        ]
        for unit, parameters in units(model).items()
    }


def traffic(
    model: Units,
    stage: int,
    ranks: int,
    *,
    replicas: int = 1,
    backwards: int = 1,
    reshard_after_forward: bool = True,
    gatherings: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Payload of one step of so many backward passes, by the operation's name in the record.

    `ranks` share one replica's state; there is more than one replica in stage 3 alone. `gatherings` says how often
    stage 3 gathers each unit in a step, where passes do not simply follow each other.
    """
    if stage == 0:
        return {"all_reduce": bucket_bytes(model, parts=None)} if ranks > 1 else {}
    if stage < 3:
        once = bucket_bytes(model, parts=ranks)
        return {"reduce_scatter_single": once * (backwards if stage == 2 else 1), "all_gather_single": once}
    sent = {"all_gather_single": 0, "reduce_scatter_single": 0, "all_reduce": 0}
    for unit, parameters in model.items():
        gathered = backwards * (2 if reshard_after_forward and unit else 1) if gatherings is None else gatherings[unit]
        gradients = shard_bytes([each for each in parameters if each.trainable], ranks)
        if ranks > 1:
            sent["all_gather_single"] += gathered * shard_bytes(parameters, ranks) * ranks
            sent["reduce_scatter_single"] += backwards * gradients * ranks
        if replicas > 1:
            sent["all_reduce"] += gradients
    return {operation: payload for operation, payload in sent.items() if payload}


def bucket_bytes(model: Units, parts: int | None) -> int:
    """Of all buckets: with padding if they are parted."""
    total = 0
    for parameters in model.values():
        counts: dict[tuple[int, str], list[int]] = defaultdict(list)
        for each in parameters:
            if each.trainable:
                counts[each.element_size, each.apart].append(math.prod(each.shape))
        total += sum(lay_out(some, size, parts)[1] * size for (size, _), some in counts.items())
    return total


def shard_bytes(parameters: Sequence[Held], ranks: int) -> int:
    """Of one rank's shards in FSDP2, with padding."""
    return sum(
        aligned(each.shape[0], ranks) // ranks * math.prod(each.shape[1:]) * each.element_size for each in parameters
    )
