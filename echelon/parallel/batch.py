"""What a rank sees of a global batch, and how many of the batch's targets count.

The global batch is the same whatever the layout: its samples are dealt to the ranks of `dp` in runs, and each sequence
to the ranks of `cp` as the kind of sequence parallelism wants it. Ranks of `tp` see the same.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    given, dp = next(iter(batch.values())), grid.mesh("dp")
    [mine] = deal(len(given), 0, dp.size(), dp.get_local_rank())
    own = {name: tensor[mine.start : mine.stop] for name, tensor in batch.items()}
    own["samples_B"] = torch.arange(first + mine.start, first + mine.stop, device=given.device)
    return own | sequences(own, grid, kind=kind, causal=causal)


def deal(batch: int, micro_batch: int, ranks: int, rank: int) -> list[range]:
    """Which samples of a step one of the `ranks` of dp gets, for each of its passes: of all that are left in the step,
    a pass takes the first `micro_batch` for each rank, in runs. With 0 there is one pass.
    """
    if batch < 1 or batch % ranks:
        raise ValueError(f"a batch of {batch} cannot be dealt to dp={ranks}: use a multiple of {ranks}")
    each = micro_batch or batch // ranks
    if each < 1 or batch // ranks % each:
        raise ValueError(
            f"a batch of {batch} gives each of dp={ranks} {batch // ranks} samples, which do not divide into passes of "
            f"micro_batch={micro_batch}"
        )
    return [range(first + rank * each, first + (rank + 1) * each) for first in range(0, batch, each * ranks)]


def sequences(
    batch: dict[str, Tensor], grid: Grid, *, kind: sequence.Kind = "ring", causal: bool = True
) -> dict[str, Tensor]:
    """Of this rank's samples what changes where sequences are split: its part of each, and `positions_S`."""
    if grid.mesh("cp").size() == 1:
        return {}
    names = [name for name in batch if name.endswith("_BS")]
    parts = sequence.part(*(batch[name] for name in names), mesh=grid.mesh("cp"), kind=kind, causal=causal)
    return dict(zip([*names, "positions_S"], parts, strict=True))


def count(targets: Tensor, data: DeviceMesh) -> Tensor:
    """How many targets count, over all ranks of the `data` view: what the sum of losses is divided by. At least 1."""
    counted: Tensor = counts([targets], data)[0]
    return counted


def counts(updates: Sequence[Tensor], data: DeviceMesh, alike: int = 1) -> Tensor:
    """The same for several updates, each with its own targets. So many ranks have the same ones, for tiles of the same
    images.
    """
    counted = torch.stack([(targets != IGNORED).sum() for targets in updates])
    if data.size() > 1:
        dist.all_reduce(counted, group=data.get_group())
    return (counted // alike).clamp_(min=1)
