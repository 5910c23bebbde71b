"""What is measured: operations and sizes, in groups of several shapes, over the roads that could win there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from echelon.comm.routes import ALGORITHMS, OPERATIONS, SIZED, Place, Road, obstacle

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
LOW_DTYPE, DTYPE = "bfloat16", "float32"  # what stands for dtypes that no library reduces, and for all others


@dataclass(frozen=True, slots=True)
class Question:
    """An operation in groups of one shape: what a rule of a table answers."""

    operation: str
    ranks: int
    nodes: int
    device: str = "cpu"
    low: bool = False

    @property
    def sized(self) -> bool:
        return self.operation in SIZED

    def __str__(self) -> str:
        where = f"{self.ranks} ranks on {self.nodes} node{'s'[: self.nodes > 1]}"
        return f"{self.operation}{f' ({LOW_DTYPE})' if self.low else ''}, {where}"


@dataclass(frozen=True, slots=True)
class Point:
    """A question at one size of the payload, in bytes."""

    question: Question
    size: int

    def to_data(self) -> dict[str, Any]:
        return asdict(self.question) | {"bytes": self.size}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Point:
        fields = {name: data[name] for name in ("operation", "ranks", "nodes", "device", "low")}
        return cls(Question(**fields), data["bytes"])


def shapes(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of a group of each shape that the world has room for, if rank `r` is on node `nodes[r]`: the whole,
    one rank of each node, and 2, 4, 8, … and all of one node.
    """
    first = [rank for rank, node in enumerate(nodes) if node == nodes[0]]
    leaders = [next(members)[0] for _, members in groupby(sorted(enumerate(nodes), key=_node), key=_node)]
    found = [first[: 2**power] for power in range(1, len(first).bit_length()) if 2**power <= len(first)]
    found += [group for group in (first, sorted(leaders), list(range(len(nodes)))) if len(group) > 1]
    return list({(len(group), len({nodes[rank] for rank in group})): group for group in found}.values())


def _node(pair: tuple[int, int]) -> int:
    return pair[1]


def questions(ranks: int, nodes: int, device: str, operations: Sequence[str]) -> Iterator[Question]:
    for operation in OPERATIONS:
        if operation in operations and not (device != "cpu" and operation == "barrier"):
            yield Question(operation, ranks, nodes, device)
            if operation in REDUCTIONS:
                yield Question(operation, ranks, nodes, device, low=True)


def sizes_of(question: Question, sizes: Sequence[int]) -> list[int]:
    """Those that give each rank an element at least; none matters for a barrier."""
    if question.operation == "barrier":
        return [0]
    return [size for size in sizes if size >= question.ranks * 4 or question.operation in ("all_reduce", "message")]


def candidates(question: Question, place: Place) -> list[Road]:
    """The roads that are different there, and can be taken."""
    found = [Road(name) for name in ("nccl", "mpi", "gloo")]
    if question.sized:
        for algorithm, having in ALGORITHMS.items():
            pointless = {
                "exchange": question.low,  # which is how these are reduced anyway
                "ring": (question.low and question.operation in REDUCTIONS) or question.ranks == 2,
                "two-level": question.nodes == 1,
                "shared": False,
            }
            if question.operation in having and not pointless[algorithm]:
                found += [Road("mpi", algorithm), Road("gloo", algorithm)]
    found = [road for road in found if not obstacle(road, question.operation, question.device, place)]
    # Inside a node Gloo's own part in the shared-memory road is its barrier, and MPI's is quicker.
    return [road for road in found if str(road) != "gloo+shared" or not place.mpi]
