"""Local SGD: ranks of `dp` train by themselves, and every so many steps their models become the mean of all.

Between two averagings nothing crosses `dp`: not gradients, nor the number of targets, nor a norm. So in a step a rank's
loss is divided by the count over `apply.summed_over(grid, strategies)`, its own ranks of `cp` alone, and is the mean
over its own samples; what is reported as the loss of a step is the mean of those over `dp`. The loop then calls

    if step % strategies.average_every == 0:  # of steps counted from 1; and before an evaluation or a checkpoint
        average(model, optimizer, grid.mesh("dp"))

With an average after every step and plain SGD it is synchronous training, as long as ranks count equally many targets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from echelon.parallel.optimizer import Optimizer


@torch.no_grad()
def average(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Make parameters, the optimizer's state and floating-point buffers their mean over the ranks of a mesh.

    Where the optimizer updates copies of the parameters, the copies are averaged, and the parameters rounded from them.
    Its count of steps stays. While a rank has no state yet, because its first steps were skipped, none is averaged.
    """
    if mesh.size() == 1:
        return
    device = next(model.parameters()).device
    kept = optimizer.kept()
    kinds = torch.tensor(len(kept), device=device)
    dist.all_reduce(kinds, dist.ReduceOp.MIN, group=mesh.get_group())
    if kinds < len(kept):
        kept = {"": kept[""]}
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for tensors in [*kept.values(), buffers]:
        _average(tensors, mesh, device)
    optimizer.write_back()


@torch.no_grad()
def average_buffers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make floating-point buffers (what a batch norm has seen of its rank's samples) their mean over a mesh."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if buffers and mesh.size() > 1:
        _average(buffers, mesh, buffers[0].device)


def _average(tensors: Sequence[Tensor], mesh: DeviceMesh, device: torch.device) -> None:
    """One all_reduce a dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for alike in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in alike]).to(device)
        dist.all_reduce(flat, group=mesh.get_group())
        flat /= mesh.size()
        for tensor, mean in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(mean.view(tensor.shape))
