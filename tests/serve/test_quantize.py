"""Models in 8 bits: what is rounded and what is not, and how near the logits stay."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon import models
from echelon.models.gpt import GPTConfig
from echelon.models.llama import LlamaConfig
from echelon.parallel import shards
from echelon.serve import fp8
from echelon.serve.quantize import KINDS, LAYERS, QuantizeError, quantize, weight_bytes

CONFIGS = {
    "gpt": GPTConfig(vocabulary=61, context=64, dim=64, layers=2, heads=4),
    "llama": LlamaConfig(vocabulary=61, dim=64, layers=2, heads=8, kv_heads=2, mlp_dim=96, qkv_bias=True, tied=True),
}
DTYPES = [torch.float32, torch.bfloat16]
NEAR = 0.04  # of logits, relative; what is rounded to 8 bits is wrong by about a hundredth, to 7 by twice that
NEAR_FP8 = 0.16  # which have 3 bits after the point, and round activations, too


def near(kind: str) -> float:
    """CPUs whose sums could overflow have a bit less for products of integers."""
    from torchao.utils import should_reduce_range

    if kind == "fp8":
        return NEAR_FP8
    return NEAR * (2 if kind == "int8-dynamic" and should_reduce_range(torch.device("cpu")) else 1)


def filled(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A whole model none of whose biases is zero."""
    model = models.build(CONFIGS[family])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1 if parameter.dim() == 1 else 0.2))
    return model.to(dtype).eval().requires_grad_(False)


def tokens(rows: int) -> Tensor:
    return torch.randint(61, (2, rows // 2), generator=torch.Generator().manual_seed(1))


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("rows", [2, 80])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_logits_stay_near(family, dtype, kind, rows):
    got = quantize(filled(family, dtype), kind)(tokens(rows))
    assert got.dtype == dtype
    assert 0 < error(got, filled(family)(tokens(rows))) < near(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_layers_of_blocks_are_rounded(kind):
    before, after = dict(filled("llama").named_parameters()), quantize(filled("llama"), kind)
    for name, parameter in after.named_parameters():
        *_, layer, which = name.split(".")
        if layer in LAYERS and which == "weight" and kind == "int8-dynamic":
            assert parameter.qdata.dtype == torch.int8
            wrong = (parameter.dequantize() - before[name]).abs()
            assert (wrong <= 0.51 * parameter.scale).all(), name
        elif layer in LAYERS and which == "weight":
            scale, value = parameter.scale_N1, before[name]
            bound = value.abs() / 15 + scale * 2**-9 if kind == "fp8" else 0.51 * scale
            assert ((parameter.data8_NK.float() * scale - value).abs() <= bound).all(), name
        else:
            assert torch.equal(parameter, before[name]), name
    assert after.head.weight is after.tokens.weight


@pytest.mark.parametrize("rows", [1, 3, 32, 33])
@pytest.mark.parametrize("features", [96, 40, 7])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_int8_multiplies_what_it_has_rounded(rows, features, bias):
    layer = nn.Linear(features, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(2 * rows, features).to(torch.bfloat16)[None, ::2]
    unrounded = layer(x)
    quantize(nn.ModuleDict({"up": layer}), "int8")
    expected = x.double() @ (layer.weight.data8_NK.double() * layer.weight.scale_N1).T
    got = layer(x)
    assert (got.shape, got.dtype) == ((1, rows, 80), torch.bfloat16)
    assert error(got, expected + (layer.bias.double() if bias else 0)) < 0.005
    assert 0 < error(got, unrounded) < 0.02


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_fp8_multiplies_what_it_has_rounded(bias):
    layer = nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(3, 5, 96).to(torch.bfloat16)
    x[0, 0] = 0
    (x8, x_scale), (w8, w_scale) = fp8.in_8_bits(x), fp8.in_8_bits(layer.weight)
    expected = (x8.double() * x_scale) @ (w8.double() * w_scale).T + (layer.bias.double() if bias else 0)
    got = quantize(nn.ModuleDict({"up": layer}), "fp8")["up"](x)
    assert got.dtype == torch.bfloat16
    assert error(got, expected) < 0.005


def test_what_the_weights_take():
    bf16, fp32 = filled("llama", torch.bfloat16), filled("llama")
    assert weight_bytes(fp32) == 2 * weight_bytes(bf16) == sum(each.nbytes for each in fp32.parameters())
    blocks = sum(each.numel() for name, each in fp32.blocks.named_parameters() if each.dim() == 2)
    rows = sum(each.shape[0] for name, each in fp32.blocks.named_parameters() if each.dim() == 2)
    saved = weight_bytes(fp32) - weight_bytes(quantize(fp32, "int8"))
    assert saved == 3 * blocks - 4 * rows  # each row has a scale in fp32
    assert weight_bytes(bf16) - weight_bytes(quantize(bf16, "fp8")) == blocks - 4 * rows


def errors_on_shards() -> dict[tuple[str, str, torch.dtype], float]:
    told = {}
    for family in CONFIGS:
        expected = filled(family)(tokens(16))
        for kind in KINDS:
            for dtype in DTYPES:
                split = quantize(shards.shard(filled(family, dtype), dist.group.WORLD), kind)
                got = split(tokens(16))
                told[family, kind, dtype] = error(got, expected) if dist.get_rank() == 0 else 0
    return told


def test_each_rank_quantizes_its_shards(ranks):
    wrong = ranks(2, errors_on_shards)[0]
    assert len(wrong) == 12
    assert all(0 < each < near(kind) for (_, kind, _), each in wrong.items()), wrong


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(QuantizeError, match="quantization 'int3' is none of int8, int8-dynamic"):
        quantize(filled("gpt"), "int3")
    with pytest.raises(QuantizeError, match="Sequential has none of the layers that are quantized, by name: qkv, out"):
        quantize(nn.Sequential(nn.Linear(2, 2)), "int8")
    with pytest.raises(
        QuantizeError, match=r"fp8 multiplies in blocks of 16, and the model has a weight of \[40, 64\]"
    ):
        quantize(nn.ModuleDict({"up": nn.Linear(64, 40)}), "fp8")
    with torch.device("meta"):
        empty = models.build(CONFIGS["gpt"])
    with pytest.raises(QuantizeError, match="fill it first"):
        quantize(empty, "int8")


def test_without_torchao_one_is_told_what_to_install(monkeypatch):
    ours = "echelon.serve.int8_dynamic"
    for name in [name for name in sys.modules if name == ours or name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(ours, raising=False)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(QuantizeError, match=r"needs torchao 0.18 or later: pip install 'echelon\[quantize\]'"):
        quantize(filled("gpt"), "int8-dynamic")


def test_nothing_is_said_that_helps_nobody():
    script = "import torch; from echelon.serve.quantize import quantize\n"
    script += "for kind in ('int8', 'int8-dynamic'):\n"
    script += "    quantize(torch.nn.ModuleDict({'up': torch.nn.Linear(8, 8)}), kind)['up'](torch.ones(1, 8))\n"
    script += "import logging; assert logging.getLogger('other').isEnabledFor(logging.WARNING)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
