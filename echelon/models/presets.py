"""The usual sizes, by name: `build("llama3-8b")`, `build("gpt2", layers=2)`; others: `build(GPTConfig(dim=64))`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from echelon.models.amoebanet import AmoebaNet, AmoebaNetConfig
from echelon.models.bert import Bert, BertConfig
from echelon.models.gpt import GPT, GPTConfig
from echelon.models.llama import Llama, LlamaConfig
from echelon.models.model import Model
from echelon.models.parts import RopeScaling
from echelon.models.resnet import ResNet, ResNetConfig
from echelon.models.unet import UNet, UNetConfig
from echelon.models.vit import ViT, ViTConfig

Config = GPTConfig | LlamaConfig | BertConfig | ViTConfig | ResNetConfig | AmoebaNetConfig | UNetConfig

MODELS: dict[type, type[Model]] = {
    GPTConfig: GPT,
    LlamaConfig: Llama,
    BertConfig: Bert,
    ViTConfig: ViT,
    ResNetConfig: ResNet,
    AmoebaNetConfig: AmoebaNet,
    UNetConfig: UNet,
}


def _llama3(dim: int, layers: int, heads: int, mlp_dim: int, stretch: float | None, **more: Any) -> LlamaConfig:
    """Llama 3, and with its context stretched Llama 3.1 (405B) and 3.2 (1B, 3B)."""
    return LlamaConfig(
        vocabulary=128256,
        context=8192 if stretch is None else 131072,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=8,
        mlp_dim=mlp_dim,
        rope_theta=500000.0,
        rope_scaling=None if stretch is None else RopeScaling(stretch, 1.0, 4.0, 8192),
        **more,
    )


def _qwen2(dim: int, layers: int, heads: int, kv_heads: int, mlp_dim: int, **more: Any) -> LlamaConfig:
    settings: dict[str, Any] = {"vocabulary": 151936, "context": 131072, "norm_eps": 1e-6, "rope_theta": 1000000.0}
    shape = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "mlp_dim": mlp_dim}
    return LlamaConfig(**(settings | shape | {"qkv_bias": True} | more))


def _qwen3(dim: int, layers: int, heads: int, mlp_dim: int, tied: bool) -> LlamaConfig:
    return _qwen2(dim, layers, heads, 8, mlp_dim, context=40960, head_dim=128, tied=tied, qkv_bias=False, qk_norm=True)


def _small_resnet(depth: int, version: int) -> ResNetConfig:
    """For images of 32 × 32 pixels: of 6n + 2 layers or, with bottlenecks, of 9n + 2."""
    return ResNetConfig(
        classes=10,
        stem_dim=16,
        dims=(16, 32, 64) if version == 1 else (64, 128, 256),
        depths=((depth - 2) // (6 if version == 1 else 9),) * 3,
        bottleneck=version == 2,
        version=version,
        small_stem=True,
    )


PRESETS: dict[str, Config] = {
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(dim=1024, layers=24, heads=16),
    "gpt2-large": GPTConfig(dim=1280, layers=36, heads=20),
    "gpt2-xl": GPTConfig(dim=1600, layers=48, heads=25),
    "llama2-7b": LlamaConfig(),
    "llama2-13b": LlamaConfig(dim=5120, layers=40, heads=40, mlp_dim=13824),
    "llama2-70b": LlamaConfig(dim=8192, layers=80, heads=64, kv_heads=8, mlp_dim=28672),
    "llama3-8b": _llama3(4096, 32, 32, 14336, None),
    "llama3-70b": _llama3(8192, 80, 64, 28672, None),
    "llama3-405b": _llama3(16384, 126, 128, 53248, 8.0),
    "llama3.2-1b": _llama3(2048, 16, 32, 8192, 32.0, head_dim=64, tied=True),
    "llama3.2-3b": _llama3(3072, 28, 24, 8192, 32.0, head_dim=128, tied=True),
    "qwen2-0.5b": _qwen2(896, 24, 14, 2, 4864, tied=True),
    "qwen2-1.5b": _qwen2(1536, 28, 12, 2, 8960, tied=True),
    "qwen2-7b": _qwen2(3584, 28, 28, 4, 18944, vocabulary=152064),
    "qwen2-72b": _qwen2(8192, 80, 64, 8, 29568, vocabulary=152064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "bert-base": BertConfig(),
    "bert-large": BertConfig(dim=1024, layers=24, heads=16),
    "bert-2.5b": BertConfig(dim=1024, layers=192, heads=16),
    "vit-b16": ViTConfig(),
    "vit-l16": ViTConfig(dim=1024, layers=24, heads=16),
    "resnet18": ResNetConfig(dims=(64, 128, 256, 512), depths=(2, 2, 2, 2), bottleneck=False),
    "resnet34": ResNetConfig(dims=(64, 128, 256, 512), bottleneck=False),
    "resnet50": ResNetConfig(),
    "resnet101": ResNetConfig(depths=(3, 4, 23, 3)),
    "resnet152": ResNetConfig(depths=(3, 8, 36, 3)),
    "resnet110": _small_resnet(110, 1),
    "resnet110-v2": _small_resnet(110, 2),
    "resnet164-v2": _small_resnet(164, 2),
    "resnet1001-v2": _small_resnet(1001, 2),
    "amoebanet-d": AmoebaNetConfig(),
    "unet": UNetConfig(),
}


def config(name: str, **overrides: Any) -> Config:
    """A preset's config, with some of its fields changed."""
    if name not in PRESETS:
        raise ValueError(f"no model is named {name!r}{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return change(PRESETS[name], overrides)


def build(name_or_config: str | Config, **overrides: Any) -> Model:
    """A model with its first values; on the meta device (`with torch.device("meta")`) without any."""
    found = name_or_config
    found = config(found, **overrides) if isinstance(found, str) else change(found, overrides)
    return MODELS[type(found)](found)


def takes_images(config: Config) -> bool:
    """Whether its samples are images, and not tokens."""
    return isinstance(config, ViTConfig | ResNetConfig | AmoebaNetConfig | UNetConfig)


def segments(config: Config) -> bool:
    """Whether it classifies each pixel of an image."""
    return isinstance(config, UNetConfig)


def is_causal(config: Config) -> bool:
    """Whether a token sees only those before it."""
    return isinstance(config, GPTConfig | LlamaConfig)


def image_side(config: Config) -> int:
    """Pixels a side of the images that a model takes; of one that takes any, as is usual."""
    return int(getattr(config, "image", 32 if getattr(config, "small_stem", False) else 224))


def change(old: Config, overrides: dict[str, Any]) -> Config:
    fields = [field.name for field in dataclasses.fields(old)]
    for name in overrides:
        if name not in fields:
            raise ValueError(
                f"{type(old).__name__} has no field {name!r}{nearest(name, fields)}; it has {', '.join(fields)}"
            )
    return dataclasses.replace(old, **overrides)


def nearest(name: str, names: Any) -> str:
    """What may have been meant, as the part of a sentence."""
    found = difflib.get_close_matches(name.lower(), list(names), 1, 0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""
