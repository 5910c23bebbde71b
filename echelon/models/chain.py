"""Models that are a chain of links, and how a part of a chain is computed alone.

A link is a run of the model's parts: an embedding, a block, a head. What one link gives is what the next one takes, but
for skips, which jump over some. A pipeline gives each rank a few spans of links (`keep`) and lets it compute one at a
time (`compute`). The model stays the model: its class, its names and its `forward` are those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

Value = Tensor | tuple[Tensor, ...]
Edge = tuple[int, int]  # from the link that gives to the link that takes
Given = Mapping[str, Any] | Sequence[Any]  # a model's arguments, by name or in order


@dataclass(frozen=True)
class Apart:
    """A parameter that other ranks of a pipeline hold too, since links of theirs share it."""

    name: str  # the first of its names in the whole model
    ranks: tuple[int, ...]  # of the pipeline
    leads: bool  # whether this rank is the first of them


def apart_of(model: nn.Module) -> Mapping[str, Apart]:
    """The parameters of any model that other ranks of a pipeline hold too, by their names here."""
    found: Mapping[str, Apart] = getattr(model, "apart", {})
    return found


class Linked(nn.Module):
    """A model that names its links. `span` is which of them `forward` computes: all, unless it is set."""

    span: range | None = None
    skips: tuple[Edge, ...] = ()
    apart: Mapping[str, Apart] = MappingProxyType({})  # by their names here

    def links(self) -> list[list[str]]:
        """The names of each link's parts (modules and parameters), in the order in which they are computed."""
        raise NotImplementedError

    def parts(self, link: int) -> list[str]:
        """The names of a link's parts, also of one that was thrown away."""
        return self._links[link]

    def edges(self) -> list[Edge]:
        """What goes from link to link."""
        return [*((link, link + 1) for link in range(len(self._links) - 1)), *self.skips]

    def crossing(self, span: range) -> tuple[list[Edge], list[Edge]]:
        """The edges into a span and out of it."""
        into = [(a, b) for a, b in self.edges() if a < span.start <= b < span.stop]
        out = [(a, b) for a, b in self.edges() if span.start <= a < span.stop <= b]
        return into, out

    def compute(
        self, span: range, given: Given, received: Mapping[Edge, Value], weights: dict[str, Tensor] | None = None
    ) -> Any:
        """What a span gives: the values of the edges out of it or, of the last, what the model gives. With `weights`
        (all of this rank's parameters, by name) these are used instead of the model's own.
        """
        self.span = span
        try:
            arguments, named = self._arguments(span, given, received)
            out = functional_call(self, weights, arguments, named) if weights is not None else self(*arguments, **named)
        finally:
            self.span = None
        return out if span.stop == len(self._links) or isinstance(out, dict) else {(span.stop - 1, span.stop): out}

    def keep(self, held: Sequence[Sequence[range]], rank: int) -> None:
        """Throw away the parts of all links but this rank's, where `held` are the spans of each rank. The names of what
        stays are what they were.
        """
        links = self._links  # read while all are there
        holders = [
            {each for each, spans in enumerate(held) if any(n in span for span in spans)} for n in range(len(links))
        ]
        apart: dict[str, Apart] = {}
        for names in self.shared():
            where = {name: holders[self.link_of(name)] for name in names}
            everyone = tuple(sorted(set().union(*where.values())))
            for name in names:
                if rank in where[name] and len(everyone) > len(where[name]):
                    apart.setdefault(name, Apart(names[0], everyone, rank == everyone[0]))
        self.apart = apart
        for link, parts in enumerate(links):
            for part in parts if rank not in holders[link] else ():
                owner, _, last = part.rpartition(".")
                delattr(self.get_submodule(owner), last)

    @property
    def ends(self) -> bool:
        """Whether the last link is computed."""
        return self.span is None or self.span.stop == len(self._links)

    def within(self, name: str) -> dict[str, nn.Module]:
        """The children of a part that are to be computed, by their keys."""
        children = {key: child for key, child in self.get_submodule(name)._modules.items() if child is not None}
        if self.span is None:
            return children
        wanted = {part for link in self.span for part in self._links[link]}
        return {key: child for key, child in children.items() if f"{name}.{key}" in wanted}

    def _arguments(self, span: range, given: Given, received: Mapping[Edge, Value]) -> tuple[tuple[Any, ...], Any]:
        """What `forward` takes: of what was received the stream or, of a model with skips, all edges."""
        if not isinstance(given, Mapping):
            raise TypeError(f"{type(self).__name__} takes its arguments by name: give a mapping for each microbatch")
        stream = received[span.start - 1, span.start] if span.start else None
        return (), {**given, "received": received if self.skips else stream}

    def shared(self) -> list[list[str]]:
        """The names of each parameter that has several."""
        found: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            found.setdefault(parameter, []).append(name)
        return [names for names in found.values() if len(names) > 1]

    def link_of(self, name: str) -> int:
        """The link that a parameter belongs to."""
        return next(
            link
            for link, parts in enumerate(self._links)
            if any(name == part or name.startswith(f"{part}.") for part in parts)
        )

    @property
    def _links(self) -> list[list[str]]:
        """As they were before any was thrown away."""
        if "_all_links" not in self.__dict__:
            self.__dict__["_all_links"] = self.links()
        found: list[list[str]] = self.__dict__["_all_links"]
        return found


class Chain(Linked):
    """Any modules, one after the other, as `nn.Sequential` has them (with its names). One may come more than once.

    A module that gives a tuple gives the next one several arguments. A skip (a, b) gives what module a has given to
    module b too, after the other arguments.
    """

    def __init__(self, *modules: nn.Module, skips: Sequence[Edge] = ()) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)
        self.skips = tuple((a, b) for a, b in skips)
        for a, b in self.skips:
            if not 0 <= a < b - 1 < len(modules) - 1:
                raise ValueError(f"skip ({a}, {b}): it jumps over at least one of modules 0 to {len(modules) - 1}")
            if self.skips.count((a, b)) > 1:
                raise ValueError(f"skip ({a}, {b}) is given more than once: once is enough")

    @classmethod
    def of(cls, sequence: nn.Sequential) -> Chain:
        """The same modules with the same names."""
        chain = cls()
        for name, module in sequence._modules.items():
            chain.add_module(name, module)
        chain.training = sequence.training
        return chain

    def links(self) -> list[list[str]]:
        return [[name] for name in self._modules]

    def forward(self, *arguments: Any, received: Mapping[Edge, Value] | None = None, **named: Any) -> Any:
        span = range(len(self._links)) if self.span is None else self.span
        flowing = dict(received or {})
        value: Any = None
        for link in span:
            module = self.get_submodule(self.parts(link)[0])
            if link == 0:
                value = module(*arguments, **named)
            else:
                more = [flowing.pop(edge) for edge in self.skips if edge[1] == link]
                taken = flowing.pop((link - 1, link)) if link == span.start else value
                value = module(*_several(taken), *(each for skipped in more for each in _several(skipped)))
            flowing |= {edge: value for edge in self.skips if edge[0] == link}
        if span.stop == len(self._links):
            return value
        return flowing | {(span.stop - 1, span.stop): value}

    def _arguments(self, span: range, given: Given, received: Mapping[Edge, Value]) -> tuple[tuple[Any, ...], Any]:
        if isinstance(given, Mapping):
            return (), {**given, "received": received}
        return tuple(given), {"received": received}


def _several(value: Value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
