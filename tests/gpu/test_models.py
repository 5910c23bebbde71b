"""Whole models on a GPU, by the kernels that training takes there: gradients within rounding of those in fp64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.models.presets import build
from echelon.parallel import fp8
from echelon.parallel.loss import chunked_cross_entropy
from tests.parallel.test_loss import error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPE: dict[str, Any] = {"vocabulary": 512, "context": 256, "dim": 256, "layers": 4, "heads": 4}
WIDE = SHAPE | {"context": 1024, "dim": 768, "layers": 2, "heads": 12}
MODELS = {
    "gpt2": SHAPE,
    "gpt2-medium": WIDE,
    "llama2-7b": SHAPE | {"mlp_dim": 512},
    "llama3-8b": SHAPE | {"mlp_dim": 512, "kv_heads": 2},
}
ROUNDING = {"fp32": 1e-4, "bf16": 0.03, "fp8": 0.15}
CANCELLED = 0.3  # of the bias before attention: what its keys add is zero, but for rounding (on a CPU, too: 0.18)


def gradients(model: Any, tokens_BS: Tensor) -> dict[str, Tensor]:
    (model(tokens_BS[:, :-1], tokens_BS[:, 1:]) / tokens_BS[:, 1:].numel()).backward()
    return {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}


@functools.cache
def exact(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """On the CPU, from weights that bf16 has too."""
    shape = (4, MODELS[name]["context"] + 1)
    tokens_BS = torch.randint(0, 512, shape, generator=torch.Generator().manual_seed(0))
    return tokens_BS, gradients(build(name, **MODELS[name]).bfloat16().double(), tokens_BS)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_fp64_within_rounding(name: str, precision: str, compiled: bool) -> None:
    tokens_BS, expected = exact(name)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model: Any = build(name, **MODELS[name]).bfloat16().to("cuda", dtype)
    model.head.loss = functools.partial(chunked_cross_entropy, chunk=300, in_fp8=precision == "fp8")
    if precision == "fp8":
        fp8.convert(model)
    if compiled:
        for block in model.blocks:
            block.compile()
    got = gradients(model, tokens_BS.cuda())
    errors = {each: error(got[each], expected[each]) for each in expected}
    low = CANCELLED if precision != "fp32" else ROUNDING["fp32"]
    bounds = {each: low if each.endswith("attention_norm.bias") else ROUNDING[precision] for each in errors}
    assert {each: of for each, of in errors.items() if of > bounds[each]} == {}
