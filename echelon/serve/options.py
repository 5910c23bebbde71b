"""What `echelon serve` and `echelon generate` are asked for, by flags or by a file, and how ranks are told of it."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.models.presets import nearest
from echelon.serve.settings import Settings
from echelon.serve.slo import Slo

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
QUANTIZED = ("none", "int8", "int8-dynamic", "fp8")


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
    context: int = Settings.context
    cache_gib: float = Settings.cache_gib
    page_size: int = Settings.page_size
    token_budget: int = Settings.token_budget
    most_running: int = Settings.most_running
    most_waiting: int = Settings.most_waiting
    reproducible: bool = Settings.reproducible
    fused: bool = Settings.fused
    graphs: bool = Settings.graphs
    ahead: bool = Settings.ahead
    slo: str = ""  # as `Slo.parse` reads it
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_mib: float = 8.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.source and self.random:
            raise OptionError(f"both {self.source} and --random {self.random} are named: take one")
        if not self.source and not self.random:
            raise OptionError(
                "name what shall be served: a Hugging Face folder, a run's folder, a file of options, or --random NAME"
            )
        if self.quantize not in QUANTIZED:
            raise OptionError(f"quantize {self.quantize!r} is none of {', '.join(QUANTIZED)}")
        if self.tp < 1:
            raise OptionError(f"tp is {self.tp}: at least 1 is needed")
        for name in ("threads", "max_body_mib", "drain_seconds"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}: it cannot be negative")
        try:
            self.settings()
        except ValueError as error:
            raise OptionError(str(error)) from None

    def settings(self) -> Settings:
        """The engine's part of them."""
        limits = {field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)}
        return Settings(**limits | {"slo": Slo.parse(self.slo) if self.slo else None})

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
            raise OptionError(f"{path}: {name} = {value!r} must be {_KINDS[kinds[name]]}")
    if told.get("source") and not Path(told["source"]).is_absolute():
        told["source"] = str(path.parent / told["source"])
    return told
