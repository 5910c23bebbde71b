"""Presets have as many parameters as the models that they are named after."""

from __future__ import annotations

import pytest
import torch

from echelon import models
from echelon.models.gpt import GPT, GPTConfig
from echelon.models.presets import PRESETS

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "bert-2.5b": 192 * (4 * 1024 * 1025 + 2 * 1024 * 4096 + 5120 + 4 * 1024)  # blocks
    + (30522 + 512 + 2 + 2) * 1024  # embeddings and their norm
    + 1024 * 1025
    + 2 * 1024
    + 30522,  # head
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet34": 21_797_672,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet110": 1_730_714,
    "resnet110-v2": 1_146_842,
    "resnet164-v2": 1_703_258,
    "resnet1001-v2": 10_327_706,
    "amoebanet-d": 319_024_120,
    "unet": 31_037_698,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_as_published(name):
    with torch.device("meta"):
        model = models.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_overrides():
    model = models.build("gpt2", layers=2, dim=48, vocabulary=100, dropout=0.1)
    assert isinstance(model, GPT)
    assert (len(model.blocks), model.tokens.weight.shape, model.dropout.p) == (2, (100, 48), 0.1)
    assert models.build(GPTConfig(dim=24, layers=1, vocabulary=10), layers=3).config.layers == 3


def test_unknown_names_say_the_nearest():
    with pytest.raises(ValueError, match=r"no model is named 'lama3-8b' .did you mean 'llama3-8b'"):
        models.build("lama3-8b")
    with pytest.raises(ValueError, match=r"GPTConfig has no field 'layer' .did you mean 'layers'"):
        models.build("gpt2", layer=2)
