"""`all_reduce` has a way of its own into the group: it must be told apart from PyTorch's by its speed alone."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from tests.comm.data import DTYPES, dtype_of, values

THEIRS = dist.all_reduce.__wrapped__
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Seen(TorchFunctionMode):
    """Notes every function of torch that is called inside."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append(function)
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls += function is dist.all_reduce
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def outcome(all_reduce, tensor, op):
    """The result, or the kind and words of the error."""
    tensor = tensor.clone()
    try:
        assert all_reduce(tensor, op) is None
    except Exception as error:
        return type(error), str(error)
    return tensor


def same_either_way():
    """Every dtype and reduction, through both fronts, with the same values or the same refusal."""
    short = 0
    group = dist.group.WORLD
    for dtype, name in itertools.product(DTYPES, REDUCTIONS):
        op, tensor = getattr(dist.ReduceOp, name), values(dist.get_rank(), 7, dtype_of(dtype))
        ours, theirs = outcome(dist.all_reduce, tensor, op), outcome(THEIRS, tensor, op)
        short += group.all_reduce_at_once(tensor.clone(), op)
        if isinstance(theirs, tuple):
            assert ours == theirs, (dtype, name)
        else:
            assert torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)), (dtype, name)
    return short


def detours():
    size = dist.get_world_size()
    with Seen() as seen:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
    assert dist.all_reduce in seen.calls
    assert tensor.tolist() == [size] * 3

    tensor = torch.ones(3).as_subclass(Subclass)
    dist.all_reduce(tensor)
    assert Subclass.calls == 1
    assert tensor.tolist() == [size] * 3

    tensors = [torch.full((2,), float(i)) for i in range(4)]
    with distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
        assert [tensor[0].item() for tensor in tensors] == [0, 1, 2, 3]  # nothing happens before the end
    assert [tensor[0].item() for tensor in tensors] == [size * i for i in range(4)]

    work = dist.all_reduce(first := torch.ones(1 << 20), async_op=True)
    dist.all_reduce(second := torch.ones(1))  # behind the first
    work.wait()
    assert first[0] == second[0] == size
    assert dist.all_reduce(tensor=torch.ones(1), op=dist.ReduceOp.MAX, group=dist.group.WORLD, async_op=False) is None


def in_a_graph():
    """Dynamo replaces the function by a functional collective."""

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        dist.all_reduce(x)
        return x * 2

    assert step(torch.ones(3)).tolist() == [2 * dist.get_world_size()] * 3


def of_fake_tensors():
    """Nothing is communicated, as over PyTorch's own backends."""
    with FakeTensorMode():
        x, whole = torch.ones(4), torch.ones(4 * dist.get_world_size())
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.all_gather_into_tensor(whole, x)


def not_a_member():
    group = dist.new_group([0])
    tensor = torch.full((1,), float(dist.get_rank()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce(tensor, group=group)
    assert tensor.item() == dist.get_rank()
    assert bool(caught) == (dist.get_rank() != 0)


def test_same_either_way(ranks):
    [short, again] = ranks(2, same_either_way)
    assert short == again >= 60


@pytest.mark.parametrize("body", [detours, in_a_graph, of_fake_tensors, not_a_member])
def test_detours(ranks, body):
    ranks(2, body)
