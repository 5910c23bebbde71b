"""How a checkpoint of Hugging Face's and a model of ours say the same: machinery for the tables in families.py.

Where both sides differ in more than a name: GPT-2's linear layers are stored transposed, and queries, keys and values
are stored apart (or, in GPT-2, as all queries, all keys, all values), while here they are fused by key-value head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

REQUIRED = object()  # stands for a default where there is none
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LINEAR = re.compile(r"\.(qkv|out|gate|up|down)\.weight$")


@dataclass(frozen=True)
class Rows:
    """Rows of one of their tensors, or (`count` None) all of them."""

    tensor: str
    start: int = 0
    count: int | None = None


@dataclass(frozen=True)
class Source:
    """What one of our tensors consists of: rows of theirs one after another, `transposed` before if so stored."""

    rows: tuple[Rows, ...]
    transposed: bool = False


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face's."""

    config: type
    architecture: str
    prefix: str  # of names, which the files of some checkpoints leave out
    names: dict[str, Any]  # of our modules and tensors, {} for numbers: theirs, or those of queries, keys and values
    fields: dict[str, tuple[str, Any]]  # of our config: the key in theirs, and what it means when that is not there
    computed: dict[str, tuple[Any, ...]]  # settings that change the computation, and the values that are computed here
    unused: str  # matches the names of tensors that may be there and are not needed
    names_untied: dict[str, Any] = field(default_factory=dict)  # those that differ where the head has its own weight
    transposed: bool = False  # whether linear layers are stored so
    read_more: Callable[[dict[str, Any]], dict[str, Any]] = _nothing  # fields that are more than a key
    write_more: Callable[[Any], dict[str, Any]] = _nothing

    def read(self, settings: dict[str, Any]) -> Any:
        """Our config, from their config.json."""
        for key, accepted in self.computed.items():
            if settings.get(key, accepted[0]) not in accepted:
                raise ValueError(f"config.json says {key} = {settings[key]!r}, but only {accepted[0]!r} is supported")
        values = {ours: settings.get(theirs, default) for ours, (theirs, default) in self.fields.items()}
        lacking = [self.fields[name][0] for name, value in values.items() if value is REQUIRED]
        if lacking:
            raise ValueError(f"config.json has no {', '.join(lacking)}: is it whole?")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return self.config(**(values | self.read_more(settings)))

    def write(self, config: Any) -> dict[str, Any]:
        """Their config.json, from our config."""
        settings = {key: accepted[0] for key, accepted in self.computed.items()}
        settings |= {theirs: setting(config, ours) for ours, (theirs, _) in self.fields.items()}
        return settings | self.write_more(config) | {"architectures": [self.architecture]}

    def source(self, name: str, config: Any) -> Source:
        """Where a tensor of ours is to be found."""
        tied = getattr(config, "tied", False)
        if tied and name == "head.weight":
            name = "tokens.weight"
        theirs = self._theirs(name, self.names if tied else self.names | self.names_untied)
        rows = tuple(_by_kv_head(theirs, config)) if ".qkv." in name else (Rows(theirs[0]),)
        return Source(rows, self.transposed and _LINEAR.search(name) is not None)

    def unneeded(self, name: str, config: Any) -> bool:
        """Whether a tensor of theirs, which stands for none of ours, may be there all the same."""
        second_copy = getattr(config, "tied", False) and [name] == self._theirs("head.weight", self.names)
        return second_copy or re.search(self.unused, name) is not None

    def _theirs(self, name: str, names: dict[str, Any]) -> list[str]:
        pattern, numbers = _NUMBER.sub("{}", name), _NUMBER.findall(name)
        module, _, leaf = pattern.rpartition(".")
        if pattern in names:
            found, ending = names[pattern], ""
        elif module in names:
            found, ending = names[module], f".{leaf}"
        else:
            raise ValueError(f"Hugging Face's {self.architecture} has nothing that stands for {name!r}")
        return [each.format(*numbers) + ending for each in ([found] if isinstance(found, str) else found)]


def setting(config: Any, name: str) -> Any:
    """A field of a config; where it says None, what that stands for."""
    value = getattr(config, name, None)
    if value is None and name == "kv_heads":
        return config.heads
    if value is None and name == "head_dim":
        return config.dim // config.heads
    if value is None and name == "mlp_dim":
        return 4 * config.dim
    return list(value) if isinstance(value, tuple) else value


def _by_kv_head(theirs: list[str], config: Any) -> Iterator[Rows]:
    """Our order of rows, in terms of their q, k and v: three tensors, or one that holds all q, then all k, all v."""
    heads, kv_heads, head_dim = (setting(config, name) for name in ("heads", "kv_heads", "head_dim"))
    starts = (0, 0, 0) if len(theirs) == 3 else (0, heads * head_dim, (heads + kv_heads) * head_dim)
    counts = (heads // kv_heads * head_dim, head_dim, head_dim)
    for head in range(kv_heads):
        for name, start, count in zip(theirs * (3 // len(theirs)), starts, counts, strict=True):
            yield Rows(name, start + head * count, count)
