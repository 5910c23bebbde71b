"""Matrix products in 8 bits, for training in bf16: the MLPs, and the head with its loss.

Hopper and later GPUs multiply 8-bit floats twice as fast. Values and weights are rounded to e4m3 (3 bits after the
point), gradients to e5m2 (2 bits, and more range), each tensor by a scale that makes its largest value, or a bound of
it, the largest that the format has. The scale comes from the tensors themselves and not from steps before, so there is
no state to save.
Products are summed in fp32; master copies, norms, attention and everything between are as they were.

Such products want both factors with the summed dimension innermost. So what is multiplied forward and backward is made
twice, once transposed: in all the bytes of one tensor in bf16. What makes them must not cost what the products save,
which takes kernels of its own, with the activation in them where it is GPT's GELU.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from echelon.parallel.recompute import blocks

try:
    from echelon.parallel import kernels
except ImportError:  # PyTorch for CPUs comes without Triton
    kernels = None  # type: ignore[assignment]

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
RANGE = 2.0**15  # by which to multiply gradients that lie between -1 and 1
MULTIPLE = 16  # of which every dimension of a product must be one, but the rows of its first factor
FIRST_GPU = (8, 9)  # the compute capability that has such products
_STEEPEST = 1.13  # that GELU gets
_gelu = partial(functional.gelu, approximate="tanh")


def check_model(model: nn.Module) -> None:
    """Whether a model's matrices, with or without memory, can be multiplied so."""
    of_mlp = [(f"MLP's {name}", layer.out_features) for name, layer in _layers(blocks(model)[0].mlp)]
    head: Any = model.get_submodule("head")
    classes, dim = head.weight.shape
    if classes % MULTIPLE:
        more = -(-classes // MULTIPLE) * MULTIPLE
        raise ValueError(
            f"fp8 multiplies in blocks of {MULTIPLE}, and the model has {classes} outputs: give it {more} (a language "
            "model by its `vocabulary`), of which the last are never targets; or fp8 = false"
        )
    for name, length in [("dim", dim), *of_mlp]:
        if length % MULTIPLE:
            raise ValueError(f"fp8 multiplies in blocks of {MULTIPLE}, and the model's {name} is {length}: fp8 = false")


def check_device(device: torch.device) -> None:
    """Whether a device multiplies so. CPUs do, but slowly: to try things."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_GPU:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"fp8 needs a GPU of compute capability 8.9 or later, and {name} is older: do without")


def convert(model: nn.Module) -> nn.Module:
    """Let the MLPs of a model's blocks multiply in fp8, in place. Parameters keep their names and their memory.

    Where the tokens of a call do not make up multiples of 16, as when single ones are sampled, they go on in the
    parameters' own precision.
    """
    for block in blocks(model):
        if _is_gelu(getattr(block.mlp, "activation", None)):
            block.mlp = GeluMLP(block.mlp)
        else:
            for name, layer in _layers(block.mlp):
                setattr(block.mlp, name, Linear(layer))
    return model


def _layers(mlp: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, layer) for name, layer in mlp.named_children() if isinstance(layer, nn.Linear)]


def _is_gelu(activation: Any) -> bool:
    return isinstance(activation, partial) and (activation.func, activation.keywords) == (_gelu.func, _gelu.keywords)


class Linear(nn.Module):
    """What `nn.Linear` does, with its parameters."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() % MULTIPLE:
            return functional.linear(x, self.weight, self.bias)
        out_NO: Tensor = _Linear.apply(x.flatten(0, -2), self.weight, self.bias)
        return out_NO.view(*x.shape[:-1], -1)


class GeluMLP(nn.Module):
    """What an MLP of two layers around GPT's GELU does, with its layers."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down

    def forward(self, x_BSD: Tensor) -> Tensor:
        up, down = self.up, self.down
        if x_BSD.shape[:-1].numel() % MULTIPLE:
            out_BSD: Tensor = down(_gelu(up(x_BSD)))
            return out_BSD
        out_ND: Tensor = _GeluMLP.apply(x_BSD.flatten(0, -2), up.weight, up.bias, down.weight, down.bias)
        return out_ND.view(x_BSD.shape)


class Factor(NamedTuple):
    """A matrix in 8 bits, as it is and transposed, and what to multiply both by."""

    plain_MN: Tensor
    turned_NM: Tensor
    scale: Tensor

    @property
    def turned(self) -> Factor:
        return Factor(self.turned_NM, self.plain_MN, self.scale)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        x, weight = factor(x_NI, VALUES), factor(weight_OI, VALUES)
        ctx.save_for_backward(*x.turned[::2], *weight.turned[::2])
        ctx.has_bias = bias_O is not None
        return multiply(x, weight, x_NI.dtype, bias_O, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = _kept(ctx.saved_tensors)
        grad = factor(grad_NO, GRADIENTS)
        of_weight = multiply(grad.turned, x, grad_NO.dtype)
        return multiply(grad, weight, grad_NO.dtype), of_weight, grad_NO.sum(0) if ctx.has_bias else None


class _GeluMLP(torch.autograd.Function):
    """Up, GELU, down: what is between the products never exists but as their factors.

    Nobody looks for the largest value of what a product has made, which would have to be read once more: an element is
    the product of two rows, and at the most the product of their lengths. (Formats with exponents do not mind a scale
    that is some times too large.)
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, up_HD: Tensor, up_bias_H: Tensor, down_DH: Tensor, down_bias_D: Tensor
    ) -> Tensor:
        longest = _longest(x_ND, 1)
        x = factor(x_ND, VALUES, longest)
        up, down = factor(up_HD, VALUES), factor(down_DH, VALUES)
        raised_NH = multiply(x, up, x_ND.dtype, up_bias_H, fast=True)
        hidden = _gelu_factor(raised_NH, longest * _longest(up_HD, 1) + _largest(up_bias_H))
        ctx.save_for_backward(
            raised_NH, _longest(down_DH, 0), *x.turned[::2], *up.turned[::2], *hidden.turned[::2], *down.turned[::2]
        )
        return multiply(hidden, down, x_ND.dtype, down_bias_D, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, ...]:
        raised_NH, longest_of_down, *kept = ctx.saved_tensors
        x, up, hidden, down = _kept(kept)
        dtype = grad_ND.dtype
        longest = _longest(grad_ND, 1)
        grad = factor(grad_ND, GRADIENTS, longest)
        of_hidden_NH = multiply(grad, down, dtype)
        of_raised = _gelu_backward_factor(of_hidden_NH, raised_NH, longest * longest_of_down)
        of_up, of_down = multiply(of_raised.turned, x, dtype), multiply(grad.turned, hidden, dtype)
        return multiply(of_raised, up, dtype), of_up, _sum(of_raised).to(dtype), of_down, grad_ND.sum(0)


def _kept(saved: Any) -> list[Factor]:
    """Matrices of which only the one transposed is needed any more, as the right factor of a product."""
    return [Factor(turned, turned, scale) for turned, scale in zip(saved[::2], saved[1::2], strict=True)]


def factor(x_MN: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> Factor:
    """Round to 8 bits, so scaled that the largest value, or a bound of it, is the largest of the format."""
    scale = _scale(_largest(x_MN) if bound is None else bound, dtype)
    if _has_kernels(x_MN):
        return both(kernels.cast(x_MN.contiguous(), scale, dtype), scale)
    return _in_8_bits(x_MN.float(), scale, dtype)


def both(plain_MN: Tensor, scale: Tensor) -> Factor:
    """Of what is in 8 bits already."""
    turned_NM = kernels.transpose(plain_MN) if _has_kernels(plain_MN) else plain_MN.T.contiguous()
    return Factor(plain_MN, turned_NM, scale)


def _gelu_factor(x_MN: Tensor, bound: Tensor) -> Factor:
    """The same of GELU(x), which is nowhere larger than x."""
    scale = _scale(bound, VALUES)
    if _has_kernels(x_MN):
        return both(kernels.cast(x_MN, scale, VALUES, gelu=True), scale)
    return _in_8_bits(_gelu(x_MN.float()), scale, VALUES)


def _gelu_backward_factor(grad_MN: Tensor, x_MN: Tensor, bound: Tensor) -> Factor:
    """The same of the gradient of x, from that of GELU(x), whose bound is given."""
    scale = _scale(bound * _STEEPEST, GRADIENTS)
    if _has_kernels(x_MN):
        return both(kernels.cast_gelu_backward(grad_MN, x_MN, scale, GRADIENTS), scale)
    of_x_MN = torch.ops.aten.gelu_backward(grad_MN.float(), x_MN.float(), approximate="tanh")
    return _in_8_bits(of_x_MN, scale, GRADIENTS)


def _sum(x: Factor) -> Tensor:
    """Over the rows."""
    if _has_kernels(x.turned_NM):
        return kernels.sum_rows(x.turned_NM) * x.scale
    return x.turned_NM.float().sum(1) * x.scale


def _has_kernels(x: Tensor) -> bool:
    return kernels is not None and x.is_cuda


def _largest(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return largest


def _longest(x_MN: Tensor, dim: int) -> Tensor:
    """The largest length of a row (dim=1) or of a column (dim=0)."""
    lengths: Tensor = torch.linalg.vector_norm(x_MN, dim=dim, dtype=torch.float32)
    return lengths.amax()


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return largest.clamp_min(torch.finfo(torch.float32).tiny * 2**32) / torch.finfo(dtype).max


def _in_8_bits(x_MN: Tensor, scale: Tensor, dtype: torch.dtype) -> Factor:
    largest = torch.finfo(dtype).max
    return both((x_MN / scale).clamp(-largest, largest).to(dtype), scale)


def multiply(
    left: Factor, right: Factor, dtype: torch.dtype, bias_N: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """The product left @ right.T. `fast` leaves long sums to the tensor cores' own registers, which round more."""
    product_MN: Tensor = torch._scaled_mm(  # functional.scaled_mm cannot be compiled by PyTorch 2.11
        left.plain_MN, right.plain_MN.T, left.scale, right.scale, bias_N, out_dtype=dtype, use_fast_accum=fast
    )
    return product_MN
