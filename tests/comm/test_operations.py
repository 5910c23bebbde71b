"""Every operation × dtype × synchronous and asynchronous × world and subgroup, against what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm.data import DTYPES, assert_same, dtype_of, op_of, operations_of, reduced, values

RANKS = 4
SUBGROUP = [0, 2, 3]
COUNT = 6


@dataclass
class Case:
    """One check on one rank: the members' ranks in the world, and helpers over them."""

    dtype: torch.dtype
    asynchronous: bool
    members: list[int]
    group: Any
    op: str = "SUM"
    device: str = "cpu"

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def me(self) -> int:
        return self.members.index(dist.get_rank())

    def mine(self, count: int = COUNT, seed: int = 0) -> Tensor:
        return self.of(self.me, count, seed).to(self.device)

    def of(self, member: int, count: int = COUNT, seed: int = 0) -> Tensor:
        return values(self.members[member], count, self.dtype, seed)

    def all(self, count: int = COUNT, seed: int = 0) -> list[Tensor]:
        return [self.of(member, count, seed) for member in range(self.size)]

    def empty(self, count: int = COUNT) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def do(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        work = function(*arguments, **keywords, group=self.group, async_op=self.asynchronous)
        if self.asynchronous:
            assert work.wait()
            if self.device == "cuda":
                torch.cuda.synchronize()
            assert work.is_completed()
        else:
            assert work is None


def all_reduce(case: Case) -> None:
    x = case.mine()
    case.do(dist.all_reduce, x, op_of(case.op))
    assert_same(x, reduced(case.all(), case.op))


def reduce(case: Case) -> None:
    for root in range(case.size):
        x = case.mine()
        case.do(dist.reduce, x, case.members[root], op_of(case.op))
        assert_same(x, reduced(case.all(), case.op) if case.me == root else case.mine())


def reduce_scatter(case: Case) -> None:
    out = case.empty()
    inputs = [case.mine(seed=piece) for piece in range(case.size)]
    case.do(dist.reduce_scatter, out, inputs, op_of(case.op))
    assert_same(out, reduced(case.all(seed=case.me), case.op))


def reduce_scatter_tensor(case: Case) -> None:
    out = case.empty()
    case.do(dist.reduce_scatter_tensor, out, case.mine(COUNT * case.size), op_of(case.op))
    pieces = [whole[case.me * COUNT : (case.me + 1) * COUNT] for whole in case.all(COUNT * case.size)]
    assert_same(out, reduced(pieces, case.op))


def reduce_scatter_uneven(case: Case) -> None:
    out = case.empty(case.me + 1)
    inputs = [case.mine(piece + 1, seed=piece) for piece in range(case.size)]
    case.do(dist.reduce_scatter, out, inputs, op_of(case.op))
    assert_same(out, reduced(case.all(case.me + 1, seed=case.me), case.op))


REDUCING = (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, reduce_scatter_uneven)


def broadcast(case: Case) -> None:
    for root in range(case.size):
        x = case.mine()
        case.do(dist.broadcast, x, case.members[root])
        assert_same(x, case.of(root))


def all_gather(case: Case) -> None:
    out = [case.empty() for _ in range(case.size)]
    case.do(dist.all_gather, out, case.mine())
    for got, expected in zip(out, case.all(), strict=True):
        assert_same(got, expected)


def all_gather_uneven(case: Case) -> None:
    out = [case.empty(member + 1) for member in range(case.size)]
    case.do(dist.all_gather, out, case.mine(case.me + 1))
    for member, got in enumerate(out):
        assert_same(got, case.of(member, member + 1))


def all_gather_into_tensor(case: Case) -> None:
    for out in (case.empty(COUNT * case.size), case.empty(COUNT * case.size).view(case.size, COUNT)):
        case.do(dist.all_gather_into_tensor, out, case.mine())
        assert_same(out.view(-1), torch.cat(case.all()))


def gather(case: Case) -> None:
    for root in range(case.size):
        out = [case.empty() for _ in range(case.size)] if case.me == root else None
        case.do(dist.gather, case.mine(), out, case.members[root])
        for got, expected in zip(out or [], case.all() if out else [], strict=True):
            assert_same(got, expected)


def scatter(case: Case) -> None:
    for root in range(case.size):
        out = case.empty()
        inputs = [case.mine(seed=piece) for piece in range(case.size)] if case.me == root else None
        case.do(dist.scatter, out, inputs, case.members[root])
        assert_same(out, case.of(root, seed=case.me))


def all_to_all(case: Case) -> None:
    out = [case.empty(case.me + 1) for _ in range(case.size)]
    case.do(dist.all_to_all, out, [case.mine(peer + 1, seed=peer) for peer in range(case.size)])
    for member, got in enumerate(out):
        assert_same(got, case.of(member, case.me + 1, seed=case.me))


def all_to_all_single(case: Case) -> None:
    out = case.empty(COUNT * case.size)
    case.do(dist.all_to_all_single, out, case.mine(COUNT * case.size))
    assert_same(
        out, torch.cat([whole[case.me * COUNT : (case.me + 1) * COUNT] for whole in case.all(COUNT * case.size)])
    )


def all_to_all_splits(case: Case) -> None:
    """Member i sends i + j rows (none from 0 to 0) to member j."""
    splits = [case.me + peer for peer in range(case.size)]
    out = case.empty(sum(splits))
    case.do(dist.all_to_all_single, out, case.mine(sum(splits)), splits, splits)
    expected = []
    for member in range(case.size):
        theirs = [member + peer for peer in range(case.size)]
        expected.append(case.of(member, sum(theirs)).split(theirs)[case.me])
    assert_same(out, torch.cat(expected))


MOVING = (
    broadcast,
    all_gather,
    all_gather_uneven,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_splits,
)


def check(
    name: str, dtype: str, asynchronous: bool, members: list[int], group: Any, op: str = "SUM", device: str = "cpu"
) -> None:
    if dist.get_rank() in members:
        globals()[name](Case(dtype_of(dtype), asynchronous, members, group, op, device))


def check_everywhere(name: str, dtype: str, op: str = "SUM") -> None:
    """In the world and a subgroup, which is made once for both: synchronously and asynchronously."""
    for members, group in ((list(range(RANKS)), None), (SUBGROUP, dist.new_group(SUBGROUP))):
        for asynchronous in (False, True):
            try:
                check(name, dtype, asynchronous, members, group, op)
            except BaseException as error:
                error.add_note(f"{'asynchronous' if asynchronous else 'synchronous'}, among the ranks {members}")
                raise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", [function.__name__ for function in MOVING])
def test_moving(ranks, operation, dtype):
    ranks(RANKS, check_everywhere, operation, dtype)


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype in DTYPES for op in operations_of(dtype)])
@pytest.mark.parametrize("operation", [function.__name__ for function in REDUCING])
def test_reducing(ranks, operation, dtype, op):
    ranks(RANKS, check_everywhere, operation, dtype, op)
