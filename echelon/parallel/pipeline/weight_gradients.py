"""Gradients of weights, left for later: what splits a backward pass in two.

The backward pass of a linear layer or a convolution makes the gradient of its input, which the stage before waits for,
and that of its weight, for which nobody waits. `split` lets both layers put the second off: in a backward pass under
`hold` it is only noted what to multiply, and `Later.make` multiplies. Outside of `hold` all is as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_Of = Callable[[], Tensor]


class Later:
    """The gradients that are still to be made, by what they belong to."""

    def __init__(self) -> None:
        self._noted: dict[Hashable, list[tuple[Tensor, _Of]]] = {}
        self._now: list[tuple[Tensor, _Of]] | None = None

    @contextmanager
    def hold(self, key: Hashable) -> Iterator[None]:
        """Backward passes in here put off the gradients of weights."""
        self._now = self._noted.setdefault(key, [])
        try:
            yield
        finally:
            self._now = None

    @torch.no_grad()
    def make(self, key: Hashable) -> None:
        """Add to the weights' gradients what was put off under a key."""
        for weight, gradient in self._noted.pop(key):
            made = gradient()
            weight.grad = made if weight.grad is None else weight.grad + made

    def note(self, weight: Tensor, gradient: _Of) -> Tensor | None:
        """A gradient now, or None if it comes later."""
        if self._now is None:
            return gradient()
        self._now.append((weight, gradient))
        return None


def split(model: nn.Module) -> Later:
    """Let a model's linear layers and convolutions put off the gradients of their weights. (Layers whose `forward` was
    replaced, as for fp8, go on as they are.)
    """
    later = Later()
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module, later)  # type: ignore[method-assign]
        elif type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.padding_mode == "zeros":
            module.forward = partial(_convolution, module, later)  # type: ignore[method-assign]
    return later


def _linear(module: nn.Linear, later: Later, input: Tensor) -> Tensor:
    out: Tensor = _Linear.apply(input, module.weight, module.bias, later)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.later = weight, later  # what is saved may come back as another tensor, from recomputation
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = ctx.later.note(ctx.weight, lambda: grad.flatten(0, -2).T @ x.flatten(0, -2))
        return of_x, of_weight, of_bias, None


def _convolution(module: Any, later: Later, input: Tensor) -> Tensor:
    if isinstance(module.padding, str):
        return type(module).forward(module, input)  # type: ignore[no-any-return]
    how = module.stride, module.padding, module.dilation, module.groups
    out: Tensor = _Convolution.apply(input, module.weight, module.bias, how, later)
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.how, ctx.later = weight, how, later
        stride, padding, dilation, groups = how
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.how
        of_bias = grad.sum([dim for dim in range(grad.dim()) if dim != 1]) if ctx.needs_input_grad[2] else None

        def gradient(which: int) -> Tensor:
            wanted = [place == which for place in range(3)]
            backward = torch.ops.aten.convolution_backward
            still = [0] * len(stride)
            made = backward(grad, x, weight, None, stride, padding, dilation, False, still, groups, wanted)
            found: Tensor = made[which]
            return found

        of_x = gradient(0) if ctx.needs_input_grad[0] else None
        of_weight = ctx.later.note(ctx.weight, lambda: gradient(1)) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, of_bias, None, None
