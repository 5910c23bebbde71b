"""Operations of a sample beside what others count, and the peaks that MFU is a share of."""

from __future__ import annotations

import pytest
import torch

from echelon.models.presets import build
from echelon.plan.flops import forward_flops, training_flops
from echelon.plan.hardware import KNOWN, known_flops, measured_flops, peak_flops


def plain(name, **fields):
    with torch.device("meta"):
        return build(name, **fields)


@pytest.mark.parametrize(("name", "length"), [("gpt2", 1024), ("gpt2-medium", 512), ("llama3-8b", 2048)])
def test_a_token_takes_six_operations_a_parameter_and_its_attention(name, length):
    """As nanoGPT and PaLM count: without what is only looked up (positions, and tokens where they are not tied)."""
    model = plain(name)
    config = model.config
    looked_up = ["positions.weight"] if config.tied else ["positions.weight", "tokens.weight"]
    parameters = sum(each.numel() for name, each in model.named_parameters() if name not in looked_up)
    expected = 6 * parameters + 12 * config.layers * config.dim * length
    assert training_flops(model, length=length) / length == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize(("name", "billions"), [("resnet50", 4.09), ("resnet18", 1.81), ("vit-b16", 17.56)])
def test_images_take_the_published_products(name, billions):
    """Multiply-adds of one image of 224 pixels: two operations each."""
    assert forward_flops(plain(name), image=224) == pytest.approx(2e9 * billions, rel=0.005)


def test_shared_keys_take_as_many_operations_as_heads_do():
    """Grouped queries save parameters, not products of attention."""
    shared, whole = (plain("llama2-7b", layers=1, kv_heads=heads) for heads in (8, 32))
    saved = 2 * 128 * 2 * (32 - 8) * 128 * 4096  # of the projections to keys and values
    assert forward_flops(whole, length=128) - forward_flops(shared, length=128) == saved


def test_counting_leaves_the_model_as_it_was():
    model = plain("gpt2", layers=1, dropout=0.1)
    assert training_flops(model, length=8) == 3 * forward_flops(model, length=8)
    assert model.training


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
    ],
)
def test_known_gpus(name, precision, teraflops):
    assert known_flops(name, precision) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("NVIDIA A10G", "bf16"), ("Tesla V100-SXM2-16GB", "bf16"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16")],
)
def test_what_no_data_sheet_tells_is_not_guessed(name, precision):
    assert known_flops(name, precision) is None


def test_fp32_is_tf32_where_pytorch_may_use_it(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert known_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12


@pytest.mark.parametrize("name", KNOWN)
def test_less_precision_is_never_slower(name):
    peak = KNOWN[name]
    assert peak.fp16 >= peak.tf32
    assert peak.fp16 >= peak.fp32 >= peak.fp64
    assert peak.tf32 == 0 or peak.tf32 >= peak.fp32


def test_a_cpu_is_measured(monkeypatch):
    monkeypatch.setattr("echelon.plan.hardware._SECONDS", 0.02)
    assert peak_flops(torch.device("cpu"), "fp32") > 1e8
    assert measured_flops(torch.device("cpu"), torch.bfloat16) > 1e8
