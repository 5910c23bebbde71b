"""`echelon.comm.route` and `ECHELON_ROUTE`: whose choice it is, how long it holds, and what cannot be chosen."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.comm.routes import Road, Rule, Table
from echelon.comm.tables import VARIABLE


def all_reduce(group: dist.ProcessGroup | None = None, count: int = 1) -> str:
    """Which way it went."""
    with echelon.comm.record() as log:
        dist.all_reduce(torch.ones(count), group=group)
    [record] = log
    return f"{record.transport} {record.algorithm}"


def new_group(route: str) -> dist.ProcessGroup:
    os.environ[VARIABLE] = route
    try:
        return dist.new_group()
    finally:
        del os.environ[VARIABLE]


def hold_until_the_end() -> None:
    group = dist.new_group()
    with echelon.comm.route(group, all_reduce="gloo"):
        assert all_reduce(group) == "gloo library"
        with echelon.comm.route(group, all_reduce="mpi+ring", all_gather="mpi+ring"):
            assert all_reduce(group) == "mpi ring"
        assert all_reduce(group) == "gloo library"
        assert all_reduce() == "mpi library"  # another group's
    assert all_reduce(group) == "mpi library"
    echelon.comm.route(group, "mpi+shared", broadcast="gloo")
    assert all_reduce(group) == "mpi shared"
    assert str(group.road("broadcast", 4)) == "gloo"
    echelon.comm.route(group, all_reduce="gloo")  # the others stay
    assert (all_reduce(group), str(group.road("broadcast", 4))) == ("gloo library", "gloo")
    echelon.comm.route(group)
    assert all_reduce(group) == "mpi library"
    assert str(group.road("broadcast", 4)) == "mpi"


def test_a_choice_holds_until_the_next_or_to_the_end_of_its_block(ranks):
    ranks(2, hold_until_the_end)


def from_other_threads() -> None:
    """Autograd's, in which DDP reduces, and the lane's own for asynchronous calls."""
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    with echelon.comm.route(group, all_reduce="gloo"), echelon.comm.record() as log:
        model(torch.ones(1, 4)).sum().backward()
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), kwargs={"group": group})
        thread.start()
        thread.join()
    assert len(log) == 3
    assert {record.transport for record in log} == {"gloo"}


def test_a_choice_holds_in_all_threads(ranks):
    ranks(2, from_other_threads)


def choose_after_an_error() -> str:
    group = dist.new_group()
    try:
        with echelon.comm.route(group, all_reduce="gloo"):
            raise KeyError("some")
    except KeyError:
        return all_reduce(group)


def test_an_error_ends_a_choice(ranks):
    assert ranks(2, choose_after_an_error) == ["mpi library"] * 2


def error_on_one_rank() -> str:
    group = dist.new_group()
    with contextlib.suppress(KeyError), echelon.comm.route(group, all_reduce="gloo"):
        if dist.get_rank() == 0:
            raise KeyError("some")
    return all_reduce(group)


def test_the_end_of_a_choice_waits_for_nobody(ranks):
    assert ranks(2, error_on_one_rank) == ["mpi library"] * 2


def differently() -> str:
    group = dist.new_group()
    with pytest.raises(dist.DistBackendError) as caught:
        echelon.comm.route(group, all_reduce="gloo" if dist.get_rank() == 1 else "mpi")
    assert all_reduce(group) == "mpi library"  # as if nothing had been asked
    return str(caught.value)


def test_ranks_that_choose_differently_are_named(ranks):
    for text in ranks(3, differently):
        assert "must choose the same roads" in text
        assert "ranks 0, 2: all_reduce=mpi" in text
        assert "rank 1: all_reduce=gloo" in text


def with_tables(folder: str) -> str:
    path = Path(folder) / f"{dist.get_rank() == 2}.json"
    road = Road("gloo" if dist.get_rank() == 2 else "mpi")
    path.write_text(Table((Rule("all_reduce", 2, 1, ((0, road),)),)).to_text())
    with pytest.raises(dist.DistBackendError) as caught:
        new_group(str(path))
    return str(caught.value)


def test_ranks_with_different_tables_are_named(ranks, tmp_path):
    for text in ranks(3, with_tables, str(tmp_path)):
        assert "the same table of routes" in text
        assert re.search(r"ranks 0, 1: \w{16}; rank 2: \w{16};", text), text


def by_variable(folder: str) -> list[str]:
    path = Path(folder) / "routes.json"
    if dist.get_rank() == 0:
        steps = ((0, Road("gloo")), (1024, Road("mpi", "shared")))
        path.write_text(Table((Rule("all_reduce", 2, 1, steps),)).to_text())
    dist.barrier()
    table = new_group(str(path))
    return [
        all_reduce(new_group("gloo")),
        all_reduce(new_group("mpi+ring")),
        all_reduce(table, 255),
        all_reduce(table, 256),
    ]


def test_the_variable_names_a_road_or_a_table(ranks, tmp_path):
    assert ranks(2, by_variable, str(tmp_path)) == [["gloo library", "mpi ring", "gloo library", "mpi shared"]] * 2


def refused(route: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what is tested)
        new_group(route)
    return str(caught.value)


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        ("fast", "ECHELON_ROUTE=fast is no road .*, no table's file and not auto"),
        ("mpi+fast", "there is no road 'mpi.fast'"),
        ("/etc/hostname", "/etc/hostname cannot be read as a table of routes: it is"),
    ],
)
def test_a_variable_that_cannot_be(ranks, route, reason):
    for text in ranks(2, refused, route):
        assert re.search(reason, text), text


def impossible() -> None:
    group = dist.new_group()
    x = torch.ones(2)
    for chosen in (lambda: echelon.comm.route(group, all_reduce="nccl"), lambda: echelon.comm.route(group, "nccl")):
        chosen()
        for asynchronous in (False, True):
            with pytest.raises(ValueError, match="all_reduce cannot go over nccl: NCCL moves CUDA tensors"):
                dist.all_reduce(x, group=group, async_op=asynchronous)
        dist.barrier(group)
        echelon.comm.route(group)
    with pytest.raises(ValueError, match=r"mpi\+ring has no broadcast"):
        echelon.comm.route(group, broadcast="mpi+ring")
    with pytest.raises(ValueError, match="there is no operation 'allreduce'"):
        echelon.comm.route(group, allreduce="mpi")
    with pytest.raises(TypeError, match="only groups of the backend 'echelon'"):
        echelon.comm.route(object(), all_reduce="mpi")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]


def test_what_cannot_be_is_an_error_and_loses_nothing(ranks):
    ranks(2, impossible)


def messages_over_gloo() -> None:
    group, rank = dist.new_group(), dist.get_rank()
    with echelon.comm.route(group, message="gloo"), echelon.comm.record() as log:
        x = torch.full((3,), float(rank))
        if rank == 0:
            dist.send(x, 2, group)
        elif rank == 2:
            dist.recv(x, 0, group)
            assert x.tolist() == [0.0] * 3
    assert [record.transport for record in log] == (["gloo"] if rank != 1 else [])


def test_messages_take_the_road_that_was_chosen_for_them(ranks):
    ranks(3, messages_over_gloo)
