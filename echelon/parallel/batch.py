"""What a rank sees of a global batch, and how many of the batch's targets count.

The global batch is the same whatever the layout: its samples are dealt to the ranks of `dp` in runs, and each sequence
to the ranks of `cp` as the kind of sequence parallelism wants it. Ranks of `tp` see the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from echelon.parallel import sequence
from echelon.parallel.layout import Grid
from echelon.parallel.loss import IGNORED


def part(
    batch: dict[str, Tensor], grid: Grid, *, kind: sequence.Kind = "ring", causal: bool = True, first: int = 0
) -> dict[str, Tensor]:
    """This rank's part of a global batch: the arguments of the model, by their names (which end in `_BS` where they
    have a sequence), with `samples_B` and, where sequences are split, `positions_S`. `first`
    is the number of the batch's first sample in the step, where a step has several batches: dropout goes by it.
    """
    samples = next(iter(batch.values())).shape[0]
    dp = grid.mesh("dp")
    if samples % dp.size():
        raise ValueError(f"a batch of {samples} cannot be dealt to dp={dp.size()}: use a multiple of {dp.size()}")
    mine = slice(*(samples // dp.size() * (dp.get_local_rank() + end) for end in (0, 1)))
    device = next(iter(batch.values())).device
    given = {name: tensor[mine] for name, tensor in batch.items()}
    given["samples_B"] = torch.arange(first, first + samples, device=device)[mine]
    if grid.mesh("cp").size() > 1:
        sequences = [name for name in given if name.endswith("_BS")]
        parts = sequence.part(*(given[name] for name in sequences), mesh=grid.mesh("cp"), kind=kind, causal=causal)
        given |= dict(zip([*sequences, "positions_S"], parts, strict=True))
    return given


def count(targets: Tensor, data: DeviceMesh) -> Tensor:
    """How many targets count, over all ranks of the `data` view: what the sum of losses is divided by. At least 1."""
    counted = (targets != IGNORED).sum()
    if data.size() > 1:
        dist.all_reduce(counted, group=data.get_group())
    return counted.clamp_(min=1)
