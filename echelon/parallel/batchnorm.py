"""Batch normalisation over the global batch: on many ranks what it is on one, on CPU and CUDA.

PyTorch's BatchNorm normalises by the batch it sees, which on each of several data-parallel ranks is only a part of it;
its SyncBatchNorm needs a GPU. Here ranks gather each other's count, mean and sum of squared deviations (which join
without the cancellation of a plain sum of squares), and in the backward pass sum two numbers a channel. Batches may be
of different sizes, also empty. The gradients of weight and bias are this rank's share, as everywhere: their sum over
the ranks is the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.torch_compat import newest


def synchronize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let each BatchNorm1d, 2d and 3d of the model normalise by the batch of all ranks of the mesh.

    The modules become `GlobalBatchNorm`s where they are: with their parameters, buffers, hooks and names.
    """
    if mesh.ndim != 1:
        raise ValueError(f"batchnorm.synchronize needs a mesh of one dimension, and this has {mesh.ndim}")
    return over(model, mesh.get_group()) if mesh.size() > 1 else model


def over(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """As `synchronize`, for a group; a model's group can be changed so."""
    for module in model.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, GlobalBatchNorm):
            module.__class__ = GlobalBatchNorm
            module.group = group  # type: ignore[assignment]
    return model


def traffic(channels: int, ranks: int, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Payload bytes by operation for one layer, forward and backward; in fp32 or larger.

    Forward: an all-gather of 2·channels + 1 numbers from each rank. Backward: an all-reduce of 2·channels.
    """
    if ranks == 1:
        return {}, {}
    size = max(element_size, 4)
    return {"all_gather_single": ranks * (2 * channels + 1) * size}, {"all_reduce": 2 * channels * size}


class GlobalBatchNorm(_BatchNorm):
    """A BatchNorm whose statistics in training are those of all ranks of its `group`; made by `synchronize`."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() < 2:
            raise ValueError(f"batch normalisation needs a batch and a channel dimension, and got {[*input.shape]}")
        if not self.training and self.running_mean is not None:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        out, mean_C, variance_C = normalize(input, self.weight, self.bias, self.eps, self.group)
        if self.training and self.track_running_stats:
            self._run(mean_C, variance_C)
        return out

    @torch.no_grad()
    def _run(self, mean_C: Tensor, variance_C: Tensor) -> None:
        """Carry the running statistics on, as one process does."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1 / self.num_batches_tracked.to(mean_C.dtype) if self.momentum is None else self.momentum
        carry_on(self.running_mean, mean_C, momentum)
        carry_on(self.running_var, variance_C, momentum)


@torch.no_grad()
def carry_on(running_C: Tensor | None, new_C: Tensor, momentum: float | Tensor) -> None:
    """A running statistic, if there is one."""
    if running_C is not None:
        running_C.copy_(running_C + momentum * (new_C - running_C))


def normalize(
    x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """By the mean and variance of each channel over all ranks of a group; and these, the variance without bias."""
    mean_C, squares_C, count = _statistics(x.detach(), group)
    scale_C = (squares_C / count + eps).rsqrt()
    out: Tensor = _Normalize.apply(x, weight_C, bias_C, mean_C, scale_C, count, group)
    return out, mean_C, squares_C / (count - 1)


def _statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and sum of squared deviations of each channel over all ranks, and how many values there are, in fp64."""
    x = _wide(x)
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    own = x.new_zeros(2 * channels + 1)
    own[0] = count
    if count and not x.is_meta:  # not var_mean, which takes several times as long
        mean_C, variance_C = torch.batch_norm_update_stats(x, None, None, 0.0)
        own[1:] = torch.cat([mean_C, variance_C * count])
    everyone = own.new_empty(group.size() * len(own))
    newest("all_gather_single", "all_gather_into_tensor")(everyone, own, group)
    counts_R1, means_RC, squares_RC = everyone.view(group.size(), -1).double().split([1, channels, channels], dim=1)
    total = counts_R1.sum()
    if count < 2 and not total.is_meta and total < 2:  # only who could be alone looks: a GPU's host waits to look
        raise ValueError("batch normalisation in training needs more than one value a channel in the global batch")
    mean_C = (counts_R1 * means_RC).sum(0) / total
    squares_C = (squares_RC + counts_R1 * (means_RC - mean_C) ** 2).sum(0)
    return mean_C, squares_C, total


class _Normalize(torch.autograd.Function):
    """(x - mean) · scale · weight + bias, where mean and scale depend on the x of all ranks.

    Images are large: each pass makes one tensor of their size, and changes that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        mean_C: Tensor,
        scale_C: Tensor,
        count: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_C, mean_C, scale_C, count)
        ctx.group = group
        wide = _wide(x)
        out = wide - _of_channels(mean_C, wide)
        out *= _of_channels(scale_C if weight_C is None else scale_C * weight_C, wide)
        if bias_C is not None:
            out += _of_channels(bias_C, wide)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_C, mean_C, scale_C, count = ctx.saved_tensors
        wide, grad = _wide(x), _wide(grad)
        sums_2C = _sums(grad, wide, mean_C.to(wide), scale_C.to(wide))
        own_2C = zip(sums_2C.clone(), ctx.needs_input_grad[1:3], strict=True)
        of_weight, of_bias = (own_C if needed else None for own_C, needed in own_2C)
        dist.all_reduce(sums_2C, group=ctx.group)
        along_C, mean_grad_C = sums_2C / count
        # of_x is (grad - mean_grad - normal · along) · scale · weight, in which normal is (x - mean) · scale.
        of_x = wide - _of_channels(mean_C, wide)
        of_x *= _of_channels(scale_C * along_C, wide)
        of_x += _of_channels(mean_grad_C, wide)
        torch.sub(grad, of_x, out=of_x)
        of_x *= _of_channels(scale_C if weight_C is None else scale_C * weight_C, wide)
        return of_x.to(x.dtype), of_weight, of_bias, None, None, None, None


def _sums(grad: Tensor, x: Tensor, mean_C: Tensor, scale_C: Tensor) -> Tensor:
    """Over each channel: of grad · (x - mean) · scale, and of grad."""
    if not x.numel():
        return x.new_zeros(2, len(mean_C))
    weight_C, wanted = torch.ones_like(scale_C), [False, True, True]  # a CUDA kernel makes what it returns like weights
    both_C = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight_C, None, None, mean_C, scale_C, True, 0.0, wanted
    )[1:]
    return torch.stack(both_C)


def _wide(x: Tensor) -> Tensor:
    """In fp32 at the least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_channels(values_C: Tensor, x: Tensor) -> Tensor:
    """In x's dtype, and in a shape that broadcasts over x."""
    return values_C.to(x.dtype).view(-1, *(1 for _ in range(x.dim() - 2)))
