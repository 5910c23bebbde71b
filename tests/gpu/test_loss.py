"""The kernels of the loss, and products in fp8, on a GPU: equal to plain operations, within their rounding."""

from __future__ import annotations

import functools

import pytest
import torch

from echelon.parallel import fp8, loss
from tests.parallel.test_fp8 import MLPS, ROUNDING, errors_of_an_mlp
from tests.parallel.test_loss import error, inputs, loss_and_gradients, whole

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPES = [(1, 5), (33, 257), (128, 4096), (300, 50304), (97, 50257)]  # rows, vocabulary


def on_gpu(rows: int, vocabulary: int, dtype: torch.dtype, bias: bool = False) -> list[torch.Tensor | None]:
    return [x if x is None else x.cuda() for x in inputs(rows, vocabulary, 64, bias, dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_the_kernels_equal_plain_operations(rows: int, vocabulary: int, dtype: torch.dtype, monkeypatch) -> None:
    given = on_gpu(rows, vocabulary, dtype, bias=True)
    chunked = functools.partial(loss.chunked_cross_entropy, chunk=64)
    assert loss._kernels_for(given[0])
    got = loss_and_gradients(chunked, *given)
    monkeypatch.setattr(loss, "kernels", None)
    expected = loss_and_gradients(chunked, *given)
    assert max(map(error, got, expected)) < {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2e-4}[dtype]


def test_more_rows_than_a_grid_has() -> None:
    """In one of its dimensions."""
    hidden, weight, _, targets = on_gpu(2**16 + 5, 96, torch.float32)
    got = loss_and_gradients(functools.partial(loss.chunked_cross_entropy, chunk=2**17), hidden, weight, None, targets)
    assert max(map(error, got, loss_and_gradients(whole, hidden, weight, None, targets))) < 1e-4


def test_a_target_beyond_the_vocabulary_is_not_a_number() -> None:
    hidden, weight, bias, targets = on_gpu(20, 100, torch.bfloat16)
    targets[3] = 100
    assert loss.chunked_cross_entropy(hidden, weight, bias, targets).isnan()


def test_logits_without_end() -> None:
    """Of infinite logits the loss is what PyTorch says; those of minus infinity have no part in it."""
    hidden, weight = torch.ones(4, 16, device="cuda"), torch.zeros(5000, 16, device="cuda")
    bias = torch.zeros(5000, device="cuda")
    bias[100:] = -torch.inf
    targets = torch.arange(4, device="cuda")
    assert error(loss.chunked_cross_entropy(hidden, weight, bias, targets), whole(hidden, weight, bias, targets)) < 1e-6


@pytest.mark.parametrize(("rows", "vocabulary"), [(33, 256), (300, 50304)])
def test_the_loss_in_fp8(rows: int, vocabulary: int, monkeypatch) -> None:
    given = on_gpu(rows, vocabulary, torch.bfloat16)
    chunked = functools.partial(loss.chunked_cross_entropy, chunk=64, in_fp8=True)
    got = loss_and_gradients(chunked, *given)
    monkeypatch.setattr(loss, "kernels", None)
    assert max(map(error, got, loss_and_gradients(chunked, *given))) < 3e-2  # of which plain operations round twice
    monkeypatch.undo()
    exact = loss_and_gradients(whole, *(x if x is None else x.double() for x in given[:3]), given[3])
    assert error(got[0], exact[0]) < 1e-2
    assert max(map(error, got[1:], exact[1:])) < ROUNDING


@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize("tokens", [32, 96, 1600])
def test_an_mlp_in_fp8(name: str, tokens: int) -> None:
    errors = errors_of_an_mlp(name, "cuda", tokens=tokens)
    assert 0 < max(errors.values()) < ROUNDING, errors


@pytest.mark.parametrize("shape", [(16, 16), (80, 144), (1600, 3072)])
def test_factors_equal_plain_operations(shape: tuple[int, int], monkeypatch) -> None:
    """But for what rounding to 8 bits makes of the last bit of an exponential."""
    x, grad = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    bound = torch.full((), 8.0, device="cuda")

    def made() -> dict[str, torch.Tensor]:
        factors = {"values": fp8.factor(x, fp8.VALUES), "gradients": fp8.factor(grad, fp8.GRADIENTS)}
        factors |= {"gelu": fp8._gelu_factor(x, bound), "back": fp8._gelu_backward_factor(grad, x, bound)}
        parts = [(name, each, part) for name, each in factors.items() for part in each._fields]
        found = {f"{name} {part}": getattr(each, part).float() for name, each, part in parts}
        return found | {"sum": fp8._sum(factors["back"])}

    got = made()
    assert {name for name, each in got.items() if not each.isfinite().all()} == set()
    monkeypatch.setattr(fp8, "kernels", None)
    expected = made()
    errors = {name: error(got[name], expected[name]) for name in got}
    assert max(errors.values()) < 5e-3, errors


def test_what_is_not_finite_is_not_hidden() -> None:
    x = torch.ones(64, 64, device="cuda").bfloat16()
    x[5, 7] = torch.nan
    assert fp8.factor(x, fp8.VALUES).plain_MN.float().isnan().any()
