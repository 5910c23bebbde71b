"""What `echelon serve` and `echelon generate` are asked for, by flags or by a file, and how ranks are told of it."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.models.presets import nearest

QUANTIZED = ("none", "int8", "int8-dynamic")


class OptionError(ValueError):
    """An option that cannot be; it says why, and what can."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model, how it is split and computed, and the engine's limits; then the server's own."""

    source: str = ""
    random: str = ""
    tp: int = 1
    precision: str = "auto"
    device: str = "auto"
    quantize: str = "none"
    threads: int = 0  # 0: as PyTorch thinks best
    context: int = 0  # 0: the model's
    cache_gib: float = 0.0  # 0: a share of what is free
    page_size: int = 16
    token_budget: int = 512
    most_running: int = 64
    most_waiting: int = 1024
    reproducible: bool = False
    slo: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_mib: float = 8.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if bool(self.source) == bool(self.random):
            raise OptionError(
                "name what shall be served: a Hugging Face folder, a run's folder, a file of options, or --random NAME"
            )
        if self.quantize not in QUANTIZED:
            raise OptionError(f"quantize {self.quantize!r} is none of {', '.join(QUANTIZED)}")
        for name in ("tp", "page_size", "token_budget", "most_running", "most_waiting"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        for name in ("threads", "context", "cache_gib", "max_body_mib", "drain_seconds"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}: it cannot be negative")

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Options:
        return cls(**json.loads(text))


def read(path: Path) -> dict[str, Any]:
    """A file (TOML) of options: `source = "folder"`, `tp = 2`, … Paths are beside the file."""
    try:
        told = tomllib.loads(path.read_text())
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is no TOML: {error}") from None
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Options)}
    for name, value in told.items():
        if name not in kinds:
            raise OptionError(
                f"{path}: no option is named {name!r}{nearest(name, kinds)}; there are {', '.join(kinds)}"
            )
        if kinds[name] is float and type(value) is int:
            told[name] = float(value)
        elif type(value) is not kinds[name]:
            raise OptionError(f"{path}: {name} = {value!r} must be a {kinds[name].__name__}")
    if told.get("source") and not Path(told["source"]).is_absolute():
        told["source"] = str(path.parent / told["source"])
    return told
