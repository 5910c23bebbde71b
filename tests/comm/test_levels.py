"""The algorithms over a transport equal one process: on groups whose ranks are told that they are on several nodes, as
many on each or not, in order or not. What passes between "nodes" goes over MPI or Gloo as it would between real ones.

Windows are made small, so that little data takes many chunks.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.comm import levels, window
from tests.comm.data import assert_same, dtype_of, op_of, operations_of, reduced, values

RANKS = 5
NODES = {
    "one node": [0, 0, 0, 0, 0],
    "a node each": [0, 1, 2, 3, 4],
    "three and two": [0, 0, 0, 1, 1],
    "mixed up": [0, 1, 0, 2, 1],
    "one and four": [0, 1, 1, 1, 1],
}
DTYPES = ("float32", "int64", "bfloat16", "bool", "complex64", "float8_e5m2", "uint16")
COUNTS = (0, 1, 4, 33, 1200)


def check(road: str, nodes: list[int], dtypes: tuple[str, ...]) -> None:
    group = dist.new_group()
    group._roads.nodes = tuple(nodes)
    small = 2**10
    with (
        mock.patch.object(levels, "_AREA", small),
        mock.patch.object(levels, "_SMALLEST", small // 2),
        mock.patch.object(window, "_SMALLEST_AREA", small),
        echelon.comm.route(group, road),
    ):
        for dtype in dtypes:
            for count in COUNTS:
                everything(group, dtype, count)


def everything(group: dist.ProcessGroup, name: str, count: int) -> None:
    me, dtype = dist.get_rank(), dtype_of(name)
    inputs = [values(rank, count, dtype) for rank in range(RANKS)]
    blocks = [values(rank, RANKS * count, dtype, seed=1) for rank in range(RANKS)]
    for op in operations_of(name):
        dist.all_reduce(x := inputs[me].clone(), op_of(op), group)
        assert_same(x, reduced(inputs, op))
        dist.reduce_scatter_tensor(x := torch.empty(count, dtype=dtype), blocks[me].clone(), op_of(op), group)
        assert_same(x, reduced([block.view(RANKS, count)[me] for block in blocks], op))
    dist.all_gather_into_tensor(x := torch.empty(RANKS * count, dtype=dtype), inputs[me], group)
    assert_same(x, torch.cat(inputs))
    for rank in set(range(RANKS)) - {me}:
        x.view(RANKS, count)[rank].zero_()
    dist.all_gather_into_tensor(x, x.view(RANKS, count)[me], group)  # in place, as FSDP2 does
    assert_same(x, torch.cat(inputs))
    dist.all_to_all_single(x := torch.empty(RANKS * count, dtype=dtype), blocks[me], group=group)
    assert_same(x, torch.cat([block.view(RANKS, count)[me] for block in blocks]))


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("road", ["mpi+two-level", "gloo+two-level"])
def test_two_levels(ranks, road, nodes):
    ranks(RANKS, check, road, NODES[nodes], DTYPES if road.startswith("mpi") else DTYPES[:3], timeout=120)


@pytest.mark.parametrize("road", ["mpi+shared", "mpi+ring", "mpi+exchange", "gloo", "gloo+ring"])
def test_other_roads(ranks, road):
    ranks(RANKS, check, road, NODES["one node"], DTYPES, timeout=120)


def autograd_sees_nothing() -> None:
    """Tensors that want gradients, and those of inference mode, are communicated as memory."""
    with echelon.comm.route(None, "mpi+shared"):
        x = torch.ones(9, requires_grad=True)
        dist.all_reduce(x)
        assert x.is_leaf
        assert x.tolist() == [2.0] * 9
        with torch.inference_mode():
            y = torch.ones(9)
        dist.all_reduce(y)
        assert y.tolist() == [2.0] * 9


def test_autograd_has_no_part_in_it(ranks):
    ranks(2, autograd_sees_nothing)


def full(road: str, nodes: tuple[int, ...], problem: OSError, folder: str) -> str:
    """On the first rank's node alone."""
    group = dist.new_group()
    group._roads.nodes = nodes
    effect = problem if dist.get_rank() == 0 else None
    with (
        mock.patch.object(window.os, "posix_fallocate", side_effect=effect),
        mock.patch.object(window, "memory_folder", return_value=folder),
    ):
        try:
            with echelon.comm.route(group, all_reduce=road):
                dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(("road", "nodes"), [("mpi+shared", (0, 0, 0, 0)), ("mpi+two-level", (0, 0, 1, 1))])
def test_no_room_for_a_window_is_said_on_all_ranks(ranks, road, nodes, tmp_path):
    for text in ranks(4, full, road, nodes, OSError(28, "No space left on device"), str(tmp_path)):
        for words in ("no room for", "No space left on device", "choose another road"):
            assert words in text
    assert list(tmp_path.iterdir()) == []


def windows_of_two_sizes() -> None:
    """The first node has room for less: all nodes cut tensors alike all the same."""
    group, nodes = dist.new_group(), (0, 0, 0, 1, 1)
    group._roads.nodes = nodes
    area = 2**10 if nodes[dist.get_rank()] == 0 else 2**12
    small = mock.patch.object(levels, "_SMALLEST", 2**9)
    with mock.patch.object(window, "_size", return_value=2 * (1 + nodes.count(nodes[dist.get_rank()])) * area), small:
        for road in ("mpi+two-level", "gloo+two-level"):
            with echelon.comm.route(group, road):
                everything(group, "float32", 5000)


def test_nodes_with_windows_of_two_sizes(ranks):
    ranks(RANKS, windows_of_two_sizes)


def averages(road: str) -> None:
    """Of numbers whose sum fp16 cannot hold, and their mean can."""
    with echelon.comm.route(None, road):
        for dtype in (torch.float16, torch.bfloat16):
            dist.all_reduce(x := torch.full((9,), 40_000.0, dtype=dtype), dist.ReduceOp.AVG)
            assert x.tolist() == torch.full((9,), 40_000.0, dtype=dtype).tolist()
            out, pieces = torch.empty(3, dtype=dtype), torch.full((6,), 40_000.0, dtype=dtype)
            dist.reduce_scatter_tensor(out, pieces, dist.ReduceOp.AVG)
            assert out.tolist() == pieces[:3].tolist()


@pytest.mark.parametrize("road", ["mpi", "mpi+shared", "gloo+two-level", "mpi+ring"])
def test_a_mean_is_divided_before_it_is_rounded(ranks, road):
    ranks(2, averages, road)


def recorded() -> list[str]:
    with echelon.comm.route(None, "mpi+ring"), echelon.comm.record() as log:
        for dtype in (torch.float32, torch.bfloat16):
            dist.all_reduce(torch.ones(9, dtype=dtype))
    return [record.algorithm for record in log]


def test_a_record_tells_what_was_done(ranks):
    """bf16 is not added step by step around a ring."""
    assert ranks(2, recorded) == [["ring", "exchange"]] * 2


def test_a_window_is_small_where_there_is_little_room():
    room = mock.Mock(f_bavail=2**14, f_frsize=2**12)  # 64 MiB, as in many a container
    assert window._size(room, 3, 2**20) == 8 * 2**20
    assert window._size(room, 3, 2**22) == 16 * 2**20  # a quarter of it
    assert window._size(room, 1023, 2**20) == 2048 * 2**16  # not smaller than is of use: better no room, and said so


def in_folder(folder: str) -> None:
    with mock.patch.object(window, "memory_folder", return_value=folder):
        check("mpi+shared", NODES["one node"], ("float32",))


def test_nothing_is_left_of_a_window(ranks, tmp_path):
    """Not even while it is in use: its file has no name."""
    ranks(RANKS, in_folder, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
