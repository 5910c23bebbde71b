"""Which road an operation takes: a pure function of the operation and a table that all ranks of a group hold alike.

A road is a transport (`mpi`, `gloo`, `nccl`), alone or with an algorithm of Echelon's own over it (`mpi+two-level`).
A table has rules: for an operation in groups of so many ranks on so many nodes, from how many bytes on which road.
What a rank asks with (operation, bytes, dtype, device, ranks, nodes) is what all members of the group know alike; so
they all get the same answer, whoever decides first. Operations whose sizes only a part of the ranks knows take one
road, whatever the size.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

SIZED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
UNSIZED = ("all_to_all_v", "gather", "scatter", "barrier", "message")
OPERATIONS = (*SIZED, *UNSIZED)
DEVICES = ("cpu", "cuda")
TRANSPORTS = ("mpi", "gloo", "nccl")
# Which operations an algorithm has; the others go over its transport alone.
ALGORITHMS = {
    "exchange": ("all_reduce", "reduce", "reduce_scatter"),
    "ring": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    "two-level": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    "shared": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
}
_VERSION = 1
_KEY = "echelon routes"


class NoRoute(ValueError):
    """A road or a table that cannot be; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Road:
    """A transport, and what stands between it and the operation."""

    transport: str
    algorithm: str = ""

    @classmethod
    def parse(cls, text: str) -> Road:
        transport, _, algorithm = text.partition("+")
        if transport not in TRANSPORTS or (algorithm and algorithm not in ALGORITHMS) or text.endswith("+"):
            raise NoRoute(
                f"there is no road {text!r}: a road is one of {', '.join(TRANSPORTS)}, alone or with an algorithm: "
                + ", ".join(f"{TRANSPORTS[0]}+{name}" for name in ALGORITHMS)
            )
        if transport == "nccl" and algorithm:
            raise NoRoute(f"there is no road {text!r}: NCCL has its own algorithms, so it goes alone")
        return cls(transport, algorithm)

    def serves(self, operation: str) -> bool:
        return not self.algorithm or operation in ALGORITHMS[self.algorithm]

    def for_any(self, operation: str) -> Road:
        """This road where the algorithm has the operation, else its transport alone."""
        return self if self.serves(operation) else Road(self.transport)

    def __str__(self) -> str:
        return f"{self.transport}+{self.algorithm}" if self.algorithm else self.transport


Steps = tuple[tuple[int, Road], ...]  # from how many bytes on which road; the first begins at 0


@dataclass(frozen=True, slots=True)
class Place:
    """What a group is to its routes: its members' number and nodes, and what they can reach each other by."""

    ranks: int
    nodes: int
    mpi: bool = True  # whether there is an MPI world
    own_gpus: bool = False  # whether every rank has a GPU of its own, and NCCL is there

    @property
    def base(self) -> str:
        """The transport that every group has."""
        return "mpi" if self.mpi else "gloo"


@dataclass(frozen=True, slots=True)
class Rule:
    """The roads of one operation in groups of one shape. `low` is for dtypes that no library reduces (bf16, fp16, …):
    where it has no rule of its own, the other holds for them too.
    """

    operation: str
    ranks: int
    nodes: int
    steps: Steps
    device: str = "cpu"
    low: bool = False

    def __post_init__(self) -> None:
        bounds = [start for start, _ in self.steps]
        if self.device not in DEVICES:
            raise NoRoute(f"there is no device {self.device!r}: there are {' and '.join(DEVICES)}")
        if not bounds or bounds[0] != 0 or sorted(set(bounds)) != bounds:
            raise NoRoute(f"the steps of {self.operation} must begin at 0 bytes and rise, but begin at {bounds}")
        if self.operation in UNSIZED and len(bounds) > 1:
            raise NoRoute(f"{self.operation} takes one road for all sizes, since not all ranks know the size")
        if not 1 <= self.nodes <= self.ranks:
            raise NoRoute(f"a group of {self.ranks} ranks cannot be on {self.nodes} nodes")
        for _, road in self.steps:
            _check_serves(road, self.operation)

    def distance(self, ranks: int, nodes: int) -> tuple[float, int] | None:
        """How far a group is from the one that this is for; none if that is of another kind: on one node, with one
        rank on each of several, with several on each.
        """
        if _kind(ranks, nodes) != _kind(self.ranks, self.nodes):
            return None
        return abs(math.log(ranks / self.ranks)) + abs(math.log(nodes / self.nodes)), self.ranks


def _check_serves(road: Road, operation: str) -> None:
    if operation not in OPERATIONS:
        raise NoRoute(f"there is no operation {operation!r}: there are {', '.join(OPERATIONS)}")
    if not road.serves(operation):
        raise NoRoute(f"{road} has no {operation}: it has {', '.join(ALGORITHMS[road.algorithm])}")


def _kind(ranks: int, nodes: int) -> str:
    return "inside" if nodes == 1 else "across" if nodes == ranks else "both"


@dataclass(frozen=True)
class Table:
    """Rules, or one road for everything; neither is the default. `about` tells when and where it was measured."""

    rules: tuple[Rule, ...] = ()
    everywhere: Road | None = None
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def digest(self) -> str:
        """The same for the same routes, on every rank."""
        return hashlib.sha256(json.dumps([str(self.everywhere), self._written_rules()]).encode()).hexdigest()[:16]

    def steps(self, operation: str, low: bool, device: str, place: Place) -> Steps:
        """The roads of an operation in a group: by the nearest rule, else by default."""
        if self.everywhere is not None and (self.everywhere.transport, operation) != ("nccl", "barrier"):
            return ((0, self.everywhere.for_any(operation)),)
        found = [
            (distance, rule)
            for rule in self.rules
            if (rule.operation, rule.device) == (operation, device)
            and rule.low <= low
            and (distance := rule.distance(place.ranks, place.nodes)) is not None
        ]
        if not found:
            return default(operation, device, place)
        return min(found, key=lambda pair: (*pair[0], pair[1].low != low))[1].steps

    def to_text(self) -> str:
        return json.dumps({_KEY: _VERSION, **self.about, "rules": self._written_rules()}, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Table:
        try:
            data = json.loads(text)
        except ValueError as error:
            raise NoRoute(f"it is not JSON ({error})") from None
        if not isinstance(data, dict) or data.get(_KEY) != _VERSION or not isinstance(data.get("rules"), list):
            raise NoRoute(f'it is no table of routes of this version ("{_KEY}": {_VERSION}, and "rules")')
        if not isinstance(data.get("machine", {}), dict):
            raise NoRoute("its machine is not described by names and values")
        about = {name: value for name, value in data.items() if name not in (_KEY, "rules")}
        return cls(tuple(_read_rule(rule) for rule in data["rules"]), about=about)

    def _written_rules(self) -> list[dict[str, Any]]:
        return [
            {
                "operation": rule.operation,
                "ranks": rule.ranks,
                "nodes": rule.nodes,
                "device": rule.device,
                "low": rule.low,
                "steps": [[start, str(road)] for start, road in rule.steps],
            }
            for rule in self.rules
        ]


def _read_rule(data: Any) -> Rule:
    try:
        steps = tuple((int(start), Road.parse(road)) for start, road in data["steps"])
        numbers = int(data["ranks"]), int(data["nodes"])
        return Rule(data["operation"], *numbers, steps, data.get("device", "cpu"), bool(data.get("low")))
    except NoRoute:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NoRoute(f"a rule needs operation, ranks, nodes and steps, and {data!r} has not ({error})") from None


# From these sizes on, an exchange and a sum of Echelon's own is faster than MPI's (benchmarks/collectives.py); between
# nodes that no two ranks share, MPI's own all_reduce would poll while it waits (benchmarks/cluster.py).
EXCHANGED = {"reduce_scatter": 2**20, "reduce": 2**23}
_EXCHANGED_ACROSS = {"all_reduce": 2**20}


def default(operation: str, device: str, place: Place) -> Steps:
    """Without a table: NCCL for CUDA tensors where every rank has a GPU of its own, MPI otherwise."""
    if device == "cuda" and operation != "barrier" and (place.own_gpus or not place.mpi):
        return ((0, Road("nccl")),)
    across = place.mpi and device == "cpu" and _kind(place.ranks, place.nodes) == "across"
    start = (EXCHANGED | (_EXCHANGED_ACROSS if across else {})).get(operation)
    alone = Road(place.base)
    return ((0, alone),) if start is None else ((0, alone), (start, Road(place.base, "exchange")))


def obstacle(road: Road, operation: str, device: str, place: Place) -> str:
    """Why an operation cannot go that way in a group; empty if it can."""
    what = f"{operation} cannot go over {road}"
    if road.transport == "mpi" and not place.mpi:
        return f"{what}: there is no MPI world here; start with `echelon run -n N …`, or choose gloo"
    if road.transport == "nccl":
        if operation == "barrier":
            return f"{what}: a barrier is for hosts; choose {place.base}"
        if device != "cuda":
            return f"{what}: NCCL moves CUDA tensors, and this one is on the CPU; choose {place.base}"
        if place.mpi and not place.own_gpus:
            return f"{what}: NCCL wants a GPU for each rank, and here ranks share one, or have none; choose mpi"
    if road.algorithm == "shared" and place.nodes > 1:
        return f"{what}: the group is on {place.nodes} nodes, which share no memory; choose {road.transport}+two-level"
    return ""


def opens_beforehand(messages: Road, device: str, place: Place) -> bool:
    """Whether a road of messages is opened before the first one: NCCL, unlike Gloo, opens without the ranks that have
    no part in it.
    """
    return messages.transport != "nccl" and not obstacle(messages, "message", device, place)


class Routes:
    """The roads of one group's operations on one device, looked up quickly."""

    __slots__ = ("_native", "_reduced_here")

    def __init__(self, table: Table, overrides: Mapping[str, Road], device: str, place: Place) -> None:
        def looked_up(operation: str, low: bool) -> tuple[tuple[int, ...], tuple[Road | str, ...]]:
            given = overrides.get(operation)
            steps = table.steps(operation, low, device, place) if given is None else ((0, given),)
            bounds, roads = zip(*steps, strict=True)
            return bounds, tuple(obstacle(road, operation, device, place) or road for road in roads)

        self._native = {operation: looked_up(operation, False) for operation in OPERATIONS}
        self._reduced_here = {operation: looked_up(operation, True) for operation in OPERATIONS}

    def road(self, operation: str, size: int, low: bool = False) -> Road:
        bounds, roads = (self._reduced_here if low else self._native)[operation]
        found = roads[bisect_right(bounds, size) - 1]
        if found.__class__ is not Road:
            raise NoRoute(str(found))
        return found


class Router:
    """A group's routes: by a table, and by what was chosen for the group since."""

    def __init__(self, table: Table, place: Place) -> None:
        self.place = place
        self._table = table
        self.choose({})

    def choose(self, overrides: Mapping[str, Road]) -> None:
        """From the next call on, these operations take these roads, and all others those of the table."""
        self.chosen = dict(overrides)
        self._on = {device: Routes(self._table, self.chosen, device, self.place) for device in DEVICES}
        self.on_cpu = self._on["cpu"]

    @property
    def carriers_of_messages(self) -> list[str]:
        """The transports that must be open before the first message."""
        carriers = [self.place.base]
        for device in DEVICES:
            ((_, road),) = self._table.steps("message", False, device, self.place)
            if opens_beforehand(road, device, self.place):
                carriers.append(road.transport)
        return list(dict.fromkeys(carriers))

    def on(self, device: str) -> Routes:
        if device not in self._on:
            raise ValueError(f"this group moves CPU and CUDA tensors, and this tensor is on {device}")
        return self._on[device]


def read_choice(text: str) -> dict[str, Road]:
    """A choice in one line: a road for all operations, others for single ones, or both: `mpi, all_reduce=gloo`."""
    name, operations = "", {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        operation, is_one, road = part.partition("=")
        if is_one:
            operations[operation.strip()] = road.strip()
        elif name:
            raise NoRoute(f"{text!r} names two roads for everything, {name} and {part}: choose one")
        else:
            name = part
    return roads_for(name, operations)


def roads_for(name: str, operations: Mapping[str, str]) -> dict[str, Road]:
    """What a user asks for: a road for all operations that it has, and others for single ones."""
    roads = {}
    if name:
        road = Road.parse(name)
        roads = {operation: road.for_any(operation) for operation in OPERATIONS}
        if road.transport == "nccl":
            del roads["barrier"]
    for operation, text in operations.items():
        road = Road.parse(text)
        _check_serves(road, operation)
        roads[operation] = road
    return roads
