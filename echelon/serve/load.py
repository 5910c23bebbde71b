"""From a name to a model that can be served: a Hugging Face folder, or a preset with random weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.models import hub
from echelon.models.llama import LlamaConfig
from echelon.models.model import Model
from echelon.models.presets import MODELS, PRESETS, Config, is_causal, nearest
from echelon.models.tokenizer import Bytes
from echelon.parallel import shards
from echelon.serve import memory
from echelon.serve.text import Text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RANDOM: dict[str, Config] = {
    "llama-tiny": LlamaConfig(vocabulary=256, context=2048, dim=256, layers=4, heads=8, kv_heads=4, mlp_dim=704),
    "llama-1b": PRESETS["llama3.2-1b"],
    "llama-8b": PRESETS["llama3-8b"],
    **{name: config for name, config in PRESETS.items() if is_causal(config)},
}


class LoadError(ValueError):
    """What cannot be served; it says why, and what to do."""


@dataclass(frozen=True)
class Loaded:
    model: Any
    text: Text
    name: str


class _Babble(Bytes):
    """For random weights with a larger vocabulary than bytes: what they say is shown as printable letters."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(32 + token % 95) for token in tokens)


def load(
    source: str,
    *,
    random: bool = False,
    precision: str = "auto",
    device: str = "auto",
    group: dist.ProcessGroup | None = None,
    text: Text | None = None,
) -> Loaded:
    """The model of a folder, or with `random` of a preset's name, on this rank; `group` has the ranks that share it.
    `text` is how it reads and writes, if the folder does not tell.
    """
    place = resolve_device(device)
    if precision not in ("auto", *DTYPES):
        raise LoadError(f"precision {precision!r} is none of auto, {', '.join(DTYPES)}")
    if random:
        config = _preset(source)
        usual = torch.float32 if place.type == "cpu" else torch.bfloat16
        dtype = usual if precision == "auto" else DTYPES[precision]
        model = _build(config, dtype, place, group, lambda model: model.initialize())
        return Loaded(model, Text(_Babble(), ends=[0]), source)
    folder = Path(source).expanduser()
    if not folder.exists():
        raise LoadError(
            f"{source} is not there: name a Hugging Face folder (download a hub's model first), a run's folder, or try "
            "without weights: --random llama-tiny"
        )
    if not (folder / "config.json").is_file():
        raise LoadError(
            f"{source} is no folder with a model's config.json and safetensors: name a Hugging Face folder, a run's "
            f"folder, or try without weights: --random llama-tiny"
        )
    try:
        config = hub.config_of(folder)
        _refuse_others(config, str(folder))
        text = text or Text.of_folder(folder)
        dtype = hub.stored_dtype(folder) if precision == "auto" else DTYPES[precision]
        model = _build(config, dtype, place, group, lambda model: hub.load_into(model, folder))
        return Loaded(model, text, folder.resolve().name)
    except ValueError as error:
        raise LoadError(str(error)) from None


def resolve_device(device: str) -> torch.device:
    """What `auto` is here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if gpus else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise LoadError(f"device {device!r} is none of auto, cpu, cuda and cuda with a number, like cuda:1")
    place = torch.device(device)
    if place.type == "cuda" and not gpus:
        raise LoadError(f"device {device}: PyTorch finds no GPU here")
    if (place.index or 0) >= max(gpus, 1):
        raise LoadError(f"device {device}: PyTorch finds {gpus} here, from cuda:0 to cuda:{gpus - 1}")
    return place


def _build(
    config: Config,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
    fill: Callable[[Any], None],
) -> Model:
    with torch.device("meta"):
        model = MODELS[type(config)](config)
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    with memory.enough_for(
        f"the model's {memory.text(size)} of weights: serve it over more ranks, or in another precision"
    ):
        loaded: Model = shards.load(model, group, fill, device=device, dtype=dtype)
    return loaded


def _preset(name: str) -> Config:
    if name not in RANDOM:
        raise LoadError(f"no model is named {name!r}{nearest(name, RANDOM)}; there are {', '.join(RANDOM)}")
    return RANDOM[name]


def _refuse_others(config: Config, source: str) -> None:
    if not is_causal(config):
        raise LoadError(f"{source} holds a {type(config).__name__.removesuffix('Config')}, which does not write text")
