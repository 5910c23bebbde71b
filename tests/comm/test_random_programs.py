"""Random programs of collectives and messages on overlapping groups end, and are right.

A program is plain data: the same steps for all ranks, but each rank chooses for itself which calls are asynchronous,
when it waits, and in which order. Such a program is legal PyTorch: every rank issues the operations of a group in one
order. Whatever the choices, it must end: over MPI alone, and over tables that send every operation and size another
way, with roads that are chosen anew in the middle.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import echelon
from echelon.comm import levels
from echelon.comm.routes import ALGORITHMS, OPERATIONS
from tests.comm.data import assert_same, values
from tests.comm.tables import ROADS, in_force, random_table

KINDS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "reduce",
    "barrier",
    "message",
)
GROUPS = {
    3: ([0, 1, 2], [0, 1], [1, 2], [0, 2]),
    4: ([0, 1, 2, 3], [0, 1], [1, 2], [2, 3], [0, 3], [0, 2, 3], [1, 2, 3]),
}
TABLES, PROGRAMS = 10, 25  # of each table


@dataclass(frozen=True)
class Step:
    """One operation: on which group, on how many elements of which dtype, and by which member if there is a root."""

    kind: str
    group: int
    count: int
    dtype: str
    root: int


@st.composite
def programs(draw: st.DrawFn, ranks: int, kinds: tuple[str, ...] = KINDS) -> list[Step]:
    step = st.builds(
        Step,
        kind=st.sampled_from(kinds),
        group=st.integers(0, len(GROUPS[ranks]) - 1),
        count=st.sampled_from([1, 7, 1000, 70_000]),
        dtype=st.sampled_from(["float32", "int64", "bfloat16"]),
        root=st.integers(0, 3),
    )
    return draw(st.lists(step, min_size=5, max_size=25))


@dataclass
class Started:
    """An operation under way, and what must be true once it is complete."""

    work: Any
    results: list[Tensor]
    expected: list[Tensor]

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        for result, expected in zip(self.results, self.expected, strict=True):
            assert_same(result, expected)


def start(number: int, step: Step, members: list[int], group: dist.ProcessGroup, asynchronous: bool) -> Started:
    """Begin this rank's part of a step."""
    dtype, count, size = getattr(torch, step.dtype), step.count, len(members)
    me, root = members.index(dist.get_rank()), step.root % size

    def of(member: int, piece: int = 0) -> Tensor:
        return values(members[member], count, dtype, seed=10 * number + piece)

    def empty() -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def total(piece: int = 0) -> Tensor:
        return torch.stack([of(member, piece).double() for member in range(size)]).sum(0).to(dtype)

    common = {"group": group, "async_op": asynchronous}
    x = of(me)
    if step.kind == "all_reduce":
        return Started(dist.all_reduce(x, **common), [x], [total()])
    if step.kind == "reduce":
        return Started(dist.reduce(x, members[root], **common), [x], [total() if me == root else of(me)])
    if step.kind == "broadcast":
        return Started(dist.broadcast(x, members[root], **common), [x], [of(root)])
    if step.kind == "all_gather":
        out = [empty() for _ in members]
        return Started(dist.all_gather(out, x, **common), out, [of(member) for member in range(size)])
    if step.kind == "reduce_scatter":
        out = empty()
        return Started(dist.reduce_scatter(out, [of(me, piece) for piece in range(size)], **common), [out], [total(me)])
    if step.kind == "all_to_all":
        out = [empty() for _ in members]
        inputs = [of(me, piece) for piece in range(size)]
        return Started(dist.all_to_all(out, inputs, **common), out, [of(member, me) for member in range(size)])
    if step.kind == "all_to_all_single":
        out = torch.zeros(size * count, dtype=dtype)
        inputs = torch.cat([of(me, piece) for piece in range(size)])
        expected = torch.cat([of(member, me) for member in range(size)])
        return Started(dist.all_to_all_single(out, inputs, **common), [out], [expected])
    if step.kind == "route":
        return _route(step, group)
    if step.kind == "gather":
        out = [empty() for _ in members] if me == root else None
        return Started(
            dist.gather(x, out, members[root], **common),
            out or [],
            [of(member) for member in range(size)] if me == root else [],
        )
    if step.kind == "scatter":
        out = empty()
        inputs = [of(me, piece) for piece in range(size)] if me == root else None
        return Started(dist.scatter(out, inputs, members[root], **common), [out], [of(root, me)])
    if step.kind == "message":
        return _message(me, root, step, members, group, of, empty)
    return Started(dist.barrier(**common), [], [])


def _message(
    me: int, root: int, step: Step, members: list[int], group: dist.ProcessGroup, of: Any, empty: Any
) -> Started:
    receiver = (root + 1) % len(members)
    tag = step.count % 3
    if me == root:
        return Started(dist.isend(of(me), members[receiver], group, tag), [], [])
    if me == receiver:
        out = empty()
        return Started(dist.irecv(out, members[root], group, tag), [out], [of(root)])
    return Started(None, [], [])


def _route(step: Step, group: dist.ProcessGroup) -> Started:
    """Another road for one operation, or, with one in three, those of the table again."""
    choice = random.Random(f"{step.root} {step.count} {step.dtype}")
    operation = choice.choice(OPERATIONS)
    road = choice.choice([road for road in ROADS if road.serves(operation)])
    echelon.comm.route(group, **({operation: str(road)} if step.root else {}))
    return Started(None, [], [])


def run(program: list[Step], seed: int) -> None:
    go([dist.new_group(members) for members in GROUPS[dist.get_world_size()]], program, seed)


def run_routed(drawn: list[tuple[list[Step], int]], seed: int) -> set[str]:
    """Several programs on the same groups; returns the roads that these have opened.

    The ranks are told that they are on two nodes, two on each, and windows are small: so there are two levels, and
    tensors of many chunks.
    """
    layout = GROUPS[dist.get_world_size()]
    with in_force(random_table(seed, (2, 3, 4))):
        groups = [dist.new_group(members) for members in layout]
    for group, members in zip(groups, layout, strict=True):
        if dist.get_rank() in members:
            group._roads.nodes = tuple(member // 2 for member in members)
    with mock.patch.object(levels, "_AREA", 2**16), mock.patch.object(levels, "_SMALLEST", 2**14):
        for program, number in drawn:
            go(groups, program, number)
    mine = [group for group, members in zip(groups, layout, strict=True) if dist.get_rank() in members]
    return {str(road) for group in mine for road, _ in group._roads._open}


def go(groups: list[dist.ProcessGroup], program: list[Step], seed: int) -> None:
    rank = dist.get_rank()
    choice = random.Random(1000 * seed + rank)
    layout = GROUPS[dist.get_world_size()]
    under_way: list[Started] = []
    for number, step in enumerate(program):
        if rank in layout[step.group]:
            started = start(number, step, layout[step.group], groups[step.group], choice.random() < 0.6)
            under_way.append(started)
        while under_way and choice.random() < 0.2:
            under_way.pop(choice.randrange(len(under_way))).finish()
    choice.shuffle(under_way)
    for started in under_way:
        started.finish()


@pytest.mark.parametrize(("size", "examples"), [(3, 100), (4, 100), pytest.param(4, 1000, marks=pytest.mark.slow)])
def test_random_programs(ranks, size, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # a program that hangs costs a pool: report it as it is rather than shrink it
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(program=programs(size), seed=st.integers(0, 2**16))
    def check(program: list[Step], seed: int) -> None:
        ranks(size, run, program, seed, timeout=30)

    check()


@pytest.mark.parametrize("number", range(TABLES))
def test_random_programs_over_random_tables(ranks, number):
    """Every operation and size another way: 250 programs, sync and async, on overlapping groups."""
    drawn: list[tuple[list[Step], int]] = []

    @settings(max_examples=PROGRAMS, deadline=None, database=None, phases=[Phase.generate])
    @seed(number)
    @given(program=programs(4, (*KINDS, "route")), choices=st.integers(0, 2**16))
    def draw(program: list[Step], choices: int) -> None:
        drawn.append((program, choices))

    draw()
    assert len(drawn) == PROGRAMS
    taken = set().union(*ranks(4, run_routed, drawn, number, timeout=120))
    assert {road.partition("+")[0] for road in taken} == {"mpi", "gloo"}
    assert {road.partition("+")[2] for road in taken} == {"", *ALGORITHMS}
