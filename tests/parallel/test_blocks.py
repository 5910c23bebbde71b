"""Blocks of attention: PyTorch's kernels against plain operations, and both against attention to all keys at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from echelon.parallel import blocks

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {"causal": (16, 16, True), "more keys": (16, 40, False), "more queries": (33, 7, False)}


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in norm."""
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def tensors(heads: tuple[int, int], queries: int, keys: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, k, v and a gradient of the output, in the middle of larger tensors."""
    generator = torch.Generator().manual_seed(11)
    counts = ((heads[0], queries), (heads[1], keys), (heads[1], keys), (heads[0], queries))
    wide = [torch.randn(2, head, length + 3, 16, generator=generator).double() for head, length in counts]
    return [x.to(device, dtype)[:, :, 1:-2] for x in wide]


def kernel_errors(
    kernel: str, dtype: torch.dtype, heads: tuple[int, int], shape: tuple[int, int, bool], device: str = "cpu"
) -> list[float]:
    """Of output, log-sum-exp and gradients by a kernel, against plain operations."""
    queries, keys, causal = shape
    q, k, v, grad = tensors(heads, queries, keys, dtype, device)
    assert blocks.kernel(q) == kernel
    out, lse = blocks.forward(q, k, v, causal=causal)
    plain_out, plain_lse = blocks.plain_forward(q, k, v, causal=causal)
    assert lse.dtype == plain_lse.dtype == blocks.accumulate(dtype)
    got = [out, lse, *blocks.backward(grad, q, out, lse, k, v, causal=causal)]
    expected = [plain_out, plain_lse, *blocks.plain_backward(grad, q, out, plain_lse, k, v, causal=causal)]
    return [error(x, y) for x, y in zip(got, expected, strict=True)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_kernels_equal_plain_operations(
    dtype: torch.dtype, heads: tuple[int, int], shape: tuple[int, int, bool]
) -> None:
    assert max(kernel_errors("cpu", dtype, heads, shape)) < TOLERANCES[dtype]


def test_the_kernel_can_be_chosen() -> None:
    q = torch.zeros(1, 1, 2, 8)
    with sdpa_kernel(SDPBackend.MATH):
        assert blocks.kernel(q) == "plain"
    assert blocks.kernel(q) == "cpu"


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["plain", "kernel"])
def test_joined_blocks_are_attention_to_all_keys(backend: SDPBackend) -> None:
    q, k, v, grad = tensors((4, 2), 9, 30, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
    expected.backward(grad)
    expected = expected.detach()
    parts = [slice(0, 7), slice(7, 8), slice(8, 30)]
    with sdpa_kernel(backend):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
        for keys in parts:
            out, lse = blocks.join(out, lse, *blocks.forward(q, k[:, :, keys], v[:, :, keys], causal=False))
        shares = [blocks.backward(grad, q, out, lse, k[:, :, keys], v[:, :, keys], causal=False) for keys in parts]
    of_q, of_k, of_v = zip(*shares, strict=True)
    got = [out, sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)]
    assert max(error(x, y) for x, y in zip(got, [expected, *(leaf.grad for leaf in leaves)], strict=True)) < 1e-12
