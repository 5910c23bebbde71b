"""What a training run is told, as plain data: sections of a TOML file, each a dataclass.

`load` reads a file, `--set section.name=value` overrides single settings, and whatever is not known, or of the wrong
kind, is an error that names the nearest thing that is. What only together makes no sense (a batch that does not divide
by the layout, heads by tp, …) is found by `checks.check`, before any rank is started.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from echelon.comm.routes import read_choice
from echelon.models import hub
from echelon.models.presets import Config as ModelConfig
from echelon.models.presets import change, image_side, nearest
from echelon.models.presets import config as model_config
from echelon.parallel.apply import Strategies
from echelon.parallel.layout import Layout, Stage


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where samples come from."""

    kind: Literal["text", "tokens", "datasets", "images", "large-images", "synthetic"] = "synthetic"
    path: str = ""  # a file or folder; of `datasets` a name or folder; "python" is Python's own standard library
    held_out_path: str = ""  # the same for evaluation; without it, `held_out` of the samples are kept back
    held_out: float = 0.01
    tokenizer: str = "bytes"  # or a tokenizer.json, or a Hugging Face folder that has one
    length: int = 0  # of a sequence; 0: the model's context
    image: int = 0  # pixels a side of an image; 0: what the model takes, or 224
    dtype: Literal["uint16", "uint32"] = "uint16"  # of a token file that has no description beside it
    split: str = "train"  # of `datasets`
    held_out_split: str = ""  # of `datasets`, to be evaluated on; of held_out_path, or else of the same path
    column: str = "text"  # of `datasets`
    masked: float = 0.15  # of the tokens of a masked language model
    samples: int = 65536  # of `synthetic`


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, how much at a time, and what to do on the way."""

    steps: int = 1000
    batch: int = 32  # samples in a step, over all ranks
    micro_batch: int = 0  # samples in one pass of one rank; 0: all that it has in a step, or what suits a pipeline
    seed: int = 0
    clip: float = 1.0  # the norm that gradients are clipped to; 0: they are not
    non_finite: Literal["stop", "skip"] = "stop"
    timeout: float = 1800.0  # seconds that a rank waits for others, before it is a hang
    log_every: int = 10
    eval_every: int = 0  # steps; 0: at the end alone
    eval_samples: int = 256
    device: Literal["auto", "cpu", "cuda"] = "auto"
    sample: int = 0  # tokens to write at the end, as a sample of what was learned


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    momentum: float = 0.9  # of sgd
    on_cpu: bool = False  # whether its state is in the host's memory


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Of the learning rate: a linear warm-up, and then."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: int = 100  # steps
    decay: float = 0.2  # the share of the steps that wsd falls in
    floor: float = 0.1  # what is left of the learning rate at the end


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: int = 0  # steps; 0: at the end alone
    keep: int = 2
    resume: Literal["auto", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The roads of what communicates in each view of the layout, as `mpi+shared` or `all_reduce=gloo`; empty: those of
    the table in force.
    """

    data: str = ""
    replicate: str = ""
    shard_cp: str = ""
    cp: str = ""
    tp: str = ""
    pp: str = ""

    def __post_init__(self) -> None:
        for text in self.chosen.values():
            read_choice(text)

    @property
    def chosen(self) -> dict[str, str]:
        return {view: text for view, text in asdict(self).items() if text}


@dataclass(frozen=True, kw_only=True)
class Record:
    """Of which steps every operation is recorded in files."""

    first: int = 5
    steps: int = 5


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `model` has a preset's `name`, or `init`, a Hugging Face folder to start from, and beside it the
    fields of the model's own config that differ.
    """

    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "gpt2"})
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    layout: Layout = field(default_factory=lambda: Layout(dp=-1))
    strategies: Strategies = field(default_factory=Strategies)
    checkpoint: Checkpoint = Checkpoint()
    record: Record = Record()
    routes: Routes = Routes()

    @property
    def architecture(self) -> ModelConfig:
        """The model's own config."""
        return _architecture(self.model)

    @property
    def name(self) -> str:
        """The model's: a preset's, or that of the folder that it starts from."""
        return str(self.model.get("name") or Path(self.model["init"]).name)

    @property
    def image(self) -> int:
        """Pixels a side, where samples are images."""
        return self.data.image or image_side(self.architecture)

    @property
    def length(self) -> int:
        """Tokens in a sequence; 0 where samples are no sequences."""
        return self.data.length or getattr(self.architecture, "context", 0)


SECTIONS: dict[str, Any] = typing.get_type_hints(Config)


class ConfigError(ValueError):
    """Something that the user has asked for cannot be."""


def load(path: Path, overrides: Sequence[str] = (), init: Path | None = None) -> Config:
    """A config file, with some settings changed: `section.name=value`, the value as TOML has it (or a bare word).

    `init` takes the place of the whole [model]: a Hugging Face folder to start from.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}{_configs_beside(path)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return _changed(tables, overrides, init)


def load_run(folder: Path, overrides: Sequence[str] = (), init: Path | None = None) -> Config:
    """The config of a run to go on with: dp is again what the number of ranks leaves for it."""
    found = load(folder / "config.toml")
    return _changed(tomllib.loads(dump(replace(found, layout=replace(found.layout, dp=-1)))), overrides, init)


def _changed(tables: dict[str, Any], overrides: Sequence[str], init: Path | None) -> Config:
    if init is not None:
        tables["model"] = {"init": str(init.absolute())}
    for override in overrides:
        _override(tables, override)
    return parse(tables)


def parse(tables: Mapping[str, Any]) -> Config:
    """A config from the tables of a file."""
    for name, table in tables.items():
        if name not in SECTIONS:
            raise ConfigError(f"there is no section [{name}]{nearest(name, SECTIONS)}: there are {_list(SECTIONS)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} is a section, [{name}], and not a setting")
    sections = {name: _section(name, table) for name, table in tables.items() if name != "model"}
    return Config(model=_model(tables.get("model", {})), **sections)


def dump(config: Config) -> str:
    """The whole config as TOML, with what was left out written out."""
    lines = []
    for name in SECTIONS:
        section = getattr(config, name)
        table = section if name == "model" else {key: getattr(section, key) for key in _settings(type(section))}
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _override(tables: dict[str, Any], override: str) -> None:
    where, is_one, text = override.partition("=")
    section, has_name, name = where.strip().partition(".")
    if not (is_one and has_name):
        raise ConfigError(f"--set {override}: write section.name=value, as in --set train.steps=200")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} is a section, [{section}], and not a setting")
    table[name] = value


def _model(table: Mapping[str, Any]) -> dict[str, Any]:
    model = {name: tuple(of) if isinstance(of, list) else of for name, of in table.items()}
    if "init" in model and "name" in model:
        raise ConfigError("[model] has both name, of a new model, and init, of one to start from: leave one out")
    if "init" not in model:
        model = {"name": "gpt2"} | model
    for name in ("name", "init"):
        if name in model:
            _value("model", name, model[name], str)
    hints = typing.get_type_hints(type(_architecture(model))) | {"name": str, "init": str}
    for name, of in model.items():
        numbers = of if isinstance(of, tuple) else (of,)
        if any(isinstance(number, int) and not isinstance(number, bool) and number < 1 for number in numbers):
            raise ConfigError(f"[model] {name} = {_toml(of)}: it is 1 or more")
    return {name: _value("model", name, of, hints[name]) for name, of in model.items()}


def _architecture(model: Mapping[str, Any]) -> ModelConfig:
    changed = {name: of for name, of in model.items() if name not in ("name", "init")}
    try:
        if "init" in model:
            return change(hub.config_of(model["init"]), changed)
        return model_config(model["name"], **changed)
    except (OSError, ValueError) as error:
        raise ConfigError(f"[model]: {error}") from None


def _section(name: str, table: Mapping[str, Any]) -> Any:
    section = SECTIONS[name]
    hints = _settings(section)
    for key in table:
        if key not in hints:
            raise ConfigError(f"[{name}] has no setting {key!r}{nearest(key, hints)}: it has {_list(hints)}")
    values = {key: _value(name, key, value, hints[key]) for key, value in table.items()}
    if name == "layout" and -1 not in values.values():
        values.setdefault("dp", -1)
    try:
        return section(**values)
    except ValueError as error:
        raise ConfigError(f"[{name}]: {error}") from None


def _settings(section: type) -> dict[str, Any]:
    hints = typing.get_type_hints(section)
    return {each.name: hints[each.name] for each in dataclasses.fields(section)}


def _value(section: str, name: str, value: Any, hint: Any) -> Any:
    """A setting as its field wants it, or an error that says what that is."""
    where, origin = f"[{section}] {name} = {_toml(value)}", typing.get_origin(hint)
    if origin is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed or isinstance(value, bool):
            raise ConfigError(f"{where} is none of {_list(allowed)}{nearest(str(value), map(str, allowed))}")
        return value
    if origin in (typing.Union, types.UnionType):
        kinds = [of for of in typing.get_args(hint) if of is not type(None)]
        listed = [of for of in kinds if typing.get_origin(of) in (Sequence, tuple) and isinstance(value, list | tuple)]
        return _value(section, name, value, (listed or kinds)[0])
    if origin is Sequence and typing.get_args(hint) == (Stage,):
        return _stages(where, value)
    if origin is Sequence:
        if not all(type(each) is int for each in value):
            raise ConfigError(f"{where} is not a list of whole numbers")
        return tuple(value)
    if origin is tuple:
        wanted = typing.get_args(hint)
        count = None if Ellipsis in wanted else len(wanted)
        numbers = isinstance(value, list | tuple) and all(type(each) in (int, float) for each in value)
        if not numbers or count not in (None, len(value)):
            raise ConfigError(f"{where} is not a list of {f'{count} ' if count else ''}numbers")
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        kind = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[hint]
        raise ConfigError(f"{where} is not {kind}")
    return value


def _stages(where: str, value: Any) -> list[Stage]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise ConfigError(f"{where} is not a list of tables, one for each stage: [{{sp = 4}}, {{}}]")
    hints, found = _settings(Stage), []
    for table in value:
        if unknown := [key for key in table if key not in hints]:
            raise ConfigError(f"{where}: a stage has no {unknown[0]!r}{nearest(unknown[0], hints)}: {_list(hints)}")
        degrees = {key: _value("layout", f"stages: {key}", of, hints[key]) for key, of in table.items()}
        try:
            found.append(Stage(**degrees))
        except ValueError as error:
            raise ConfigError(f"[layout]: {error}") from None
    return found


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, Stage):
        value = {name: of for name, of in asdict(value).items() if of != 1}
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {_toml(of)}' for name, of in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def _configs_beside(path: Path) -> str:
    """What may have been meant."""
    folder = path.parent if path.parent.is_dir() else Path("configs")
    beside = {str(each): each for each in folder.glob("*.toml")} if folder.is_dir() else {}
    return f"{nearest(str(path), beside)}" if beside else ""


def _list(names: Any) -> str:
    return ", ".join(map(str, names))
