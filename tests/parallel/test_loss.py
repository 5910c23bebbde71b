"""The chunked cross-entropy equals PyTorch's on whole logits, on one rank and with the vocabulary on several."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import echelon.comm
from echelon.parallel.loss import chunked_cross_entropy, traffic

EXACT = 1e-9
FACTOR = 0.37  # the gradient of the loss, as that of a mean would be


def inputs(rows: int, vocabulary: int, dim: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Hidden states, weight, bias and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(size, dim, generator=generator).double() for size in (rows, vocabulary))
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[1::5] = -100
    offsets = torch.randn(vocabulary, generator=generator).double() if bias else None
    return [*(x if x is None else x.to(dtype) for x in (hidden, weight, offsets)), targets]


def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum", ignore_index=-100)


def loss_and_gradients(
    function: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> list[Tensor]:
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    loss = function(*leaves, targets)
    (loss * FACTOR).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in norm; 0 for two zeros."""
    assert got.shape == expected.shape
    assert got.isfinite().all()
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    vocabulary=st.integers(1, 20),
    dim=st.integers(1, 6),
    chunk=st.integers(1, 25),
    bias=st.booleans(),
)
def test_it_equals_the_loss_of_whole_logits(rows: int, vocabulary: int, dim: int, chunk: int, bias: bool) -> None:
    given_inputs = inputs(rows, vocabulary, dim, bias)
    chunked = functools.partial(chunked_cross_entropy, chunk=chunk)
    got, expected = (loss_and_gradients(function, *given_inputs) for function in (chunked, whole))
    assert all(torch.allclose(x, y, rtol=EXACT, atol=1e-12) for x, y in zip(got, expected, strict=True))


def test_batches_of_sequences_keep_their_shape() -> None:
    hidden, weight, bias, targets = inputs(12, 10, 4)
    got = loss_and_gradients(chunked_cross_entropy, hidden.view(3, 4, 4), weight, bias, targets.view(3, 4))
    expected = loss_and_gradients(whole, hidden, weight, bias, targets)
    assert got[1].shape == (3, 4, 4)
    assert error(got[1].flatten(0, 1), expected[1]) < EXACT


def test_no_target_counts() -> None:
    hidden, weight, bias, targets = inputs(7, 10, 4)
    loss, *gradients = loss_and_gradients(chunked_cross_entropy, hidden, weight, bias, torch.full_like(targets, -100))
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    given_inputs = inputs(7, 10, 4)
    leaves = [x.clone().requires_grad_(index != frozen) for index, x in enumerate(given_inputs[:3])]
    chunked_cross_entropy(*leaves, given_inputs[3], chunk=3).backward()
    assert [leaf.grad is None for leaf in leaves] == [index == frozen for index in range(3)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_lower_precisions_stay_within_their_rounding(dtype: torch.dtype, tolerance: float) -> None:
    given_inputs = inputs(100, 64, 16, dtype=dtype)
    got = loss_and_gradients(functools.partial(chunked_cross_entropy, chunk=16), *given_inputs)
    assert [x.dtype for x in got] == [torch.float32, dtype, dtype, dtype]
    exact = loss_and_gradients(whole, *(x.double() for x in given_inputs[:3]), given_inputs[3])
    assert max(error(x, y) for x, y in zip(got, exact, strict=True)) < tolerance


def test_sums_over_chunks_lose_nothing_in_bf16() -> None:
    """A gradient that grows by little things from many chunks: summed in bf16 it would stop growing."""
    rows, vocabulary = 1024, 8
    hidden, weight = torch.ones(rows, 1).bfloat16(), torch.zeros(vocabulary, 1).bfloat16()
    _, _, of_weight = loss_and_gradients(
        functools.partial(chunked_cross_entropy, chunk=2), hidden, weight, None, torch.zeros(rows, dtype=torch.long)
    )
    assert error(of_weight[1:], torch.full((vocabulary - 1, 1), FACTOR * rows / vocabulary)) < 4e-3


def test_autocast_is_the_same_forward_and_backward() -> None:
    hidden, weight, bias, targets = inputs(20, 16, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = loss_and_gradients(chunked_cross_entropy, hidden, weight, bias, targets)
    low = [x.bfloat16() for x in (hidden, weight, bias)]
    expected = loss_and_gradients(chunked_cross_entropy, *low, targets)
    assert all(torch.equal(x, y.float()) for x, y in zip(got, expected, strict=True))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_whole_logits_never_exist() -> None:
    rows, vocabulary, dim, chunk = 96, 50, 4, 8
    given_inputs = inputs(rows, vocabulary, dim)
    with Largest() as plain:
        loss_and_gradients(whole, *given_inputs)
    with Largest() as chunked:
        loss_and_gradients(functools.partial(chunked_cross_entropy, chunk=chunk), *given_inputs)
    assert plain.elements == rows * vocabulary
    assert chunked.elements == max(chunk * vocabulary, rows * dim)


def test_gradients_alone_are_kept_for_the_backward_pass() -> None:
    hidden, weight, bias, targets = inputs(96, 50, 4)
    hidden, weight, bias = (x.requires_grad_() for x in (hidden, weight, bias))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_cross_entropy(hidden, weight, bias, targets, chunk=8)
    assert [x.shape for x in kept] == [x.shape for x in (hidden, weight, bias)]


class Products(TorchDispatchMode):
    """How many products of matrices there were."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += "mm" in function.name()
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(("wanted", "products"), [(True, 3), (False, 1)], ids=["training", "evaluation"])
def test_no_logit_is_computed_twice(wanted: bool, products: int) -> None:
    """Three products a chunk; one, where nobody wants gradients."""
    hidden, weight, _, targets = inputs(96, 50, 4)
    weight.requires_grad_()
    with Products() as counted, torch.set_grad_enabled(wanted):
        loss = chunked_cross_entropy(hidden.requires_grad_(), weight, None, targets, chunk=32)
        if wanted:
            loss.backward()
    assert counted.count == products * 3


def test_mistakes_are_told() -> None:
    hidden, weight, bias, targets = inputs(7, 10, 4)
    with pytest.raises(ValueError, match="at least one row"):
        chunked_cross_entropy(hidden, weight, bias, targets, chunk=0)
    with pytest.raises(ValueError, match=r"hidden is \[7, 4\], targets \[6\]"):
        chunked_cross_entropy(hidden, weight, bias, targets[:6])
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(hidden, weight, bias, targets + 10)


def bounds(vocabulary: int) -> tuple[int, int]:
    """This rank's rows of a vocabulary split into parts as equal as can be, larger ones first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = -(-vocabulary // size)
    return min(rank * part, vocabulary), min((rank + 1) * part, vocabulary)


def split_errors(
    rows: int,
    vocabulary: int,
    chunk: int,
    bias: bool,
    ignored: bool,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[float, list[float], dict[str, int]]:
    """The loss, the errors of loss and gradients against one process, and the payload bytes sent."""
    hidden, weight, offsets, targets = (
        x if x is None else x.to(device) for x in inputs(rows, vocabulary, 6, bias, dtype)
    )
    if ignored:
        targets = torch.full_like(targets, -100)
    begin, end = bounds(vocabulary)
    equal = vocabulary % dist.get_world_size() == 0
    function = functools.partial(
        chunked_cross_entropy, chunk=chunk, group=dist.group.WORLD, first=None if equal else begin
    )
    with echelon.comm.record() as log:
        loss, *got = loss_and_gradients(
            function, hidden, weight[begin:end], None if offsets is None else offsets[begin:end], targets
        )
    dist.all_reduce(got[0])
    expected_loss, *expected = loss_and_gradients(whole, hidden, weight, offsets, targets)
    expected[1:] = [gradient[begin:end] for gradient in expected[1:]]
    sent = {name: sum(r.payload for r in log if r.operation == name) for name in {r.operation for r in log}}
    return float(loss), [error(x, y) for x, y in zip([loss, *got], [expected_loss, *expected], strict=True)], sent


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("vocabulary", "chunk"), [(12, 100), (13, 4), (5, 3), (2, 1)])
@pytest.mark.parametrize("n", [2, 4])
def test_a_split_vocabulary_equals_one_process(ranks: Any, n: int, vocabulary: int, chunk: int, bias: bool) -> None:
    rows = 11
    said = traffic(rows, n, 8)
    results = ranks(n, split_errors, rows, vocabulary, chunk, bias, False)
    assert len({loss for loss, _, _ in results}) == 1
    for _, errors, sent in results:
        assert max(errors) < EXACT
        assert sent == said[0]
        assert said[1] == {}


def test_no_target_counts_in_a_split_vocabulary(ranks: Any) -> None:
    for loss, errors, _ in ranks(2, split_errors, 7, 10, 3, True, True):
        assert loss == 0
        assert errors == [0, 0, 0, 0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_a_split_vocabulary_in_lower_precision(ranks: Any, dtype: torch.dtype, tolerance: float) -> None:
    for _, errors, sent in ranks(2, split_errors, 50, 13, 8, True, False, dtype):
        assert max(errors) < tolerance
        assert sent == traffic(50, 2, dtype.itemsize)[0]
