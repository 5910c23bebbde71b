"""Layouts: every view shares out the ranks, foldings agree with their parts, and real groups hold what the data say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import echelon
from echelon.launch.cluster import obstacle
from echelon.parallel.layout import DIMENSIONS, FOLDED, HYBRID, VIEWS, Layout, Stage, across_nodes
from tests.launch.jobs import echelon as command
from tests.launch.jobs import result

degree = st.integers(1, 3)
stage = st.builds(Stage, cp=degree, sp=st.integers(1, 2), tp=degree)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Equal stages, or stages that differ; with hybrid sharding or without."""
    replicate = draw(st.integers(1, 3))
    dp = replicate * draw(st.integers(1, 3))
    if draw(st.booleans()):
        return Layout(dp=dp, replicate=replicate, stages=draw(st.lists(stage, min_size=1, max_size=3)))
    one = draw(stage)
    return Layout(dp=dp, replicate=replicate, cp=one.cp, sp=one.sp, tp=one.tp, pp=draw(st.integers(1, 3)))


def degrees_of(layout: Layout, rank: int) -> dict[str, int]:
    """The degrees of a rank's own stage."""
    grid = layout.grids[layout.coordinates(rank)["pp"]]
    return {"replicate": layout.replicate, "shard": layout.shard, "cp": grid.cp, "sp": grid.sp, "tp": grid.tp}


@given(layouts(), st.sampled_from(VIEWS))
def test_a_view_holds_each_rank_once(layout, view):
    groups = layout.groups(view)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
    assert all(group == sorted(group) for group in groups)


@given(layouts())
def test_ranks_are_counted_stage_by_stage_with_tp_innermost(layout):
    order = ("pp", "replicate", "shard", "cp", "sp", "tp")
    places = [tuple(layout.coordinates(rank)[name] for name in order) for rank in range(layout.size)]
    assert places == sorted(set(places))
    assert all(group == list(range(group[0], group[0] + len(group))) for group in layout.groups("tp"))


@given(layouts(), st.data())
def test_a_group_differs_in_its_own_dimensions_alone(layout, data):
    rank = data.draw(st.integers(0, layout.size - 1))
    mine, degrees = layout.coordinates(rank), degrees_of(layout, rank)
    for view, parts in ({name: (name,) for name in DIMENSIONS} | FOLDED).items():
        group = [layout.coordinates(other) for other in layout.group(view, rank)]
        assert len(group) == math.prod(degrees[part] for part in parts)
        for name in {"pp", *DIMENSIONS} - set(parts):
            assert {place[name] for place in group} == {mine[name]}, (view, name)


@given(layouts(), st.data())
def test_a_folding_is_made_of_its_parts(layout, data):
    """A group of a folding is, for each of its parts, some of that part's groups."""
    rank = data.draw(st.integers(0, layout.size - 1))
    for view, parts in FOLDED.items():
        folded = set(layout.group(view, rank))
        for part in parts:
            assert set().union(*(layout.group(part, other) for other in folded)) == folded
    replicate, shard_cp = (layout.group(name, rank) for name in HYBRID)
    assert set(replicate) & set(shard_cp) == {rank}
    assert len(replicate) * len(shard_cp) == len(layout.group("data", rank))
    assert layout.coordinates(rank)["dp"] == layout.group("dp", rank).index(rank)


@given(layouts())
def test_a_pipeline_goes_through_every_stage(layout):
    for group in layout.groups("pp"):
        assert {layout.coordinates(rank)["pp"] for rank in group} == set(range(len(layout.grids)))
        assert len({layout.coordinates(rank)["dp"] for rank in group}) == 1
        if layout.stages is None:
            assert len(group) == layout.pp
            assert len({tuple(layout.coordinates(rank)[name] for name in DIMENSIONS) for rank in group}) == 1


@given(layouts(), st.data())
def test_the_rest(layout, data):
    name = "dp" if layout.stages is not None else data.draw(st.sampled_from(["pp", "dp", "cp", "sp", "tp"]))
    assert replace(layout, **{name: -1}).resolve(layout.size) == layout
    assert layout.resolve(layout.size) is layout


@given(layouts(), st.integers(1, 40))
def test_what_does_not_fit_says_what_would(layout, ranks):
    """Every layout that the error names fits, if any does."""
    if layout.size == ranks:
        return
    with pytest.raises(
        ValueError, match=f"needs {layout.size} ranks?, but {ranks} .* start with -n {layout.size}"
    ) as e:
        layout.resolve(ranks)
    text = str(e.value).partition(" running: ")[2]
    named = text[text.index("Layout(") :].replace(" or Layout", ", Layout") if "Layout(" in text else ""
    named = eval(f"[{named}]")
    assert all(other.resolve(ranks) is other for other in named)
    assert named or (layout.stages is not None and ranks % sum(stage.size for stage in layout.stages))


def test_the_words_of_what_does_not_fit():
    with pytest.raises(ValueError, match="needs") as error:
        Layout(dp=3, tp=2).resolve(4)
    assert str(error.value) == (
        "Layout(dp=3, tp=2) needs 6 ranks, but 4 are running: start with -n 6, or choose degrees whose product is 4, "
        "such as Layout(dp=2, tp=2), Layout(dp=4) or Layout(tp=4)"
    )


@pytest.mark.parametrize(
    ("layout", "ranks", "words"),
    [
        (Layout(dp=-1, tp=3), 4, "all but dp makes 3, which does not divide 4: choose .* such as Layout(tp=4), "),
        (Layout(dp=2, stages=[Stage(sp=4), Stage()]), 15, "choose Layout(dp=3, stages=[Stage(sp=4), Stage()])"),
        (Layout(dp=-1, stages=[Stage(sp=4), Stage()]), 8, "start with a multiple of 5, which the stages need"),
        (Layout(dp=6, replicate=3), 8, "such as Layout(dp=8)"),
    ],
    ids=repr,
)
def test_other_words_of_what_does_not_fit(layout, ranks, words):
    with pytest.raises(ValueError, match=" ") as error:
        layout.resolve(ranks)
    for part in words.split(" .* "):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"dp": 0}, "dp counts ranks, so it is 1 or more, or -1 for the rest"),
        ({"dp": -1, "tp": -1}, "only one degree can be the rest, but dp and tp are -1"),
        ({"dp": 4, "replicate": 3}, "replicate must divide it: choose 1, 2 or 4"),
        ({"dp": 4, "replicate": -1}, "replicate counts ranks, so it is 1 or more$"),
        ({"stages": []}, "pp is their number"),
        ({"stages": [Stage()], "tp": 2}, "cp, sp and tp are each stage's own"),
    ],
    ids=str,
)
def test_what_is_no_layout(degrees, words):
    with pytest.raises(ValueError, match=words):
        Layout(**degrees)


def test_what_is_no_stage_view_or_rank():
    with pytest.raises(ValueError, match=r"Stage\(tp=-1\): tp counts ranks"):
        Stage(tp=-1)
    with pytest.raises(ValueError, match=r"there is no view 'sequence' with groups: there are replicate, .* and world"):
        Layout().groups("sequence")
    with pytest.raises(ValueError, match=r"no rank 4 in Layout\(dp=4\): it has 4, counted from 0"):
        Layout(dp=4).group("dp", 4)
    with pytest.raises(ValueError, match="leaves dp to the number of ranks: call resolve"):
        Layout(dp=-1).groups("dp")


def test_drawing():
    layout = Layout(dp=2, cp=2, tp=2, pp=2)
    assert str(layout) == layout.draw()
    assert Layout(dp=4, tp=3, replicate=2).draw(ranks_per_node=4).splitlines() == [
        "Layout(dp=4, tp=3, replicate=2): 12 ranks",
        "",
        "                      tp 0  tp 1  tp 2",
        "                    ──────────────────  node 0",
        "replicate 0  shard 0     0     1     2",
        "             shard 1     3 │   4     5",
        "replicate 1  shard 0     6     7 │   8",
        "             shard 1     9    10    11",
    ]
    assert Layout(dp=2, stages=[Stage(sp=2), Stage()]).draw(2).splitlines() == [
        "Layout(dp=2, stages=[Stage(sp=2), Stage()]): 6 ranks",
        "",
        "stage 0     tp 0",
        "          ──────  node 0",
        "dp 0  sp 0     0",
        "      sp 1     1",
        "          ──────  node 1",
        "dp 1  sp 0     2",
        "      sp 1     3",
        "",
        "stage 1  tp 0",
        "       ──────  node 2",
        "dp 0        4",
        "dp 1        5",
    ]


@given(layouts())
def test_a_drawing_shows_every_rank_once(layout):
    _, *blocks = str(layout).split("\n\n")
    ranks = []
    for grid, block in zip(layout.grids, blocks, strict=True):
        ranks += [int(word) for row in block.splitlines()[1:] for word in row.split()[-grid.tp :]]
    assert ranks == list(range(layout.size))


@given(layouts())
def test_written_as_in_a_script(layout):
    assert eval(repr(layout)) == layout


@pytest.mark.parametrize(
    ("layout", "hosts", "words"),
    [
        (Layout(dp=2, tp=2), "aabb", ""),
        (Layout(tp=4), "aaaa", ""),
        (Layout(pp=4), "abcd", ""),
        (Layout(tp=4), "aabb", r"\(rank 0, 1 on a; rank 2, 3 on b\), and .*: choose tp=1 or 2, and let dp, cp"),
        (Layout(dp=2, tp=3), "aaaabb", r"\(rank 3 on a; rank 4, 5 on b\), .*: choose tp=1 or 2,"),
        (Layout(dp=2, tp=2), "abab", "let the launcher fill one node with ranks before it goes on to the next"),
    ],
    ids=str,
)
def test_tensor_parallelism_across_nodes(layout, hosts, words):
    assert re.search(words, across_nodes(layout, list(hosts)))
    assert bool(across_nodes(layout, list(hosts))) == bool(words)


@pytest.mark.skipif(bool(obstacle()), reason=f"an emulated cluster {obstacle()}")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_warning_on_nodes(tp):
    """Rank 0 alone warns, and only where tp crosses them."""
    script = Path(__file__).parent / "scripts" / "across_nodes.py"
    warned = result(command("run", "--cluster", "2x1@1gbit", script, tp))["warned"]
    assert [len(texts) for texts in warned] == [tp - 1, 0]
    assert all("(rank 0 on n1; rank 1 on n2)" in text for text in warned[0])


LAYOUTS = {
    4: [
        Layout(dp=4),
        Layout(tp=4),
        Layout(dp=2, cp=2),
        Layout(dp=4, replicate=2),
        Layout(pp=2, tp=-1),
        Layout(stages=[Stage(tp=3), Stage()]),
    ],
    8: [
        Layout(dp=2, cp=2, tp=2),
        Layout(dp=4, replicate=2, tp=2),
        Layout(pp=2, dp=2, cp=2),
        Layout(stages=[Stage(sp=3), Stage()], dp=2),
    ],
}


def sums_over_every_view(layouts: list[Layout]) -> None:
    """Each view's group holds the ranks that the layout says, in their order, and its operations bear its name."""
    rank = dist.get_rank()
    for layout in layouts:
        grid = layout.build()
        for view in VIEWS:
            ranks, mesh, total = grid.layout.group(view, rank), grid.mesh(view), torch.tensor(float(rank))
            with echelon.comm.record() as log:
                dist.all_reduce(total, group=mesh.get_group())
            assert total == sum(ranks), (layout, view)
            assert mesh.mesh.tolist() == dist.get_process_group_ranks(mesh.get_group()) == ranks, (layout, view)
            assert (mesh.mesh_dim_names, mesh.get_local_rank()) == ((view,), ranks.index(rank)), (layout, view)
            assert [record.dimension for record in log] == [view], layout
        hybrid = grid.mesh("hybrid")
        assert hybrid.mesh_dim_names == HYBRID
        assert [hybrid.get_group(i) for i in (0, 1)] == [grid.mesh(view).get_group() for view in HYBRID]
        assert sorted(hybrid.mesh.flatten().tolist()) == grid.layout.group("data", rank)
        with pytest.raises(ValueError, match=r"there is no view 'dq': there are replicate, .*, hybrid, pp and world"):
            grid.mesh("dq")
        both = dist.new_group([0, dist.get_world_size() - 1])  # all ranks still count groups alike
        if rank in (0, dist.get_world_size() - 1):
            dist.barrier(both)


@pytest.mark.parametrize("size", LAYOUTS)
def test_sums_over_every_view(ranks, size):
    ranks(size, sums_over_every_view, LAYOUTS[size])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 3)).double()


def hybrid_sharding_beside_tensor_parallelism(sharded: str) -> None:
    """FSDP2 accepts a folded mesh, also of two dimensions, for a model that tp has split: both are parts of one."""
    grid = Layout(dp=2, cp=2, tp=2, replicate=2).build()
    model = parallelize_module(net(), grid.mesh("tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=grid.mesh(sharded))
    model.set_gradient_divide_factor(1.0)
    x = torch.randn(grid.mesh("data").size(), 5, generator=torch.Generator().manual_seed(1)).double()
    model(x[grid.mesh("data").get_local_rank()]).square().sum().backward()
    whole = net()
    whole(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharded", ["hybrid", "data"])
def test_hybrid_sharding_beside_tensor_parallelism(ranks, sharded):
    ranks(8, hybrid_sharding_beside_tensor_parallelism, sharded)


def roads_by_view() -> list[str]:
    grid = Layout(dp=2, tp=2).build(routes={"tp": "mpi+shared, broadcast=gloo", "data": "all_reduce=gloo"})
    with echelon.comm.record() as log:
        for view in ("tp", "data", "world"):
            x = torch.ones(3)
            dist.all_reduce(x, group=grid.mesh(view).get_group())
            assert x.tolist() == [len(grid.layout.group(view, dist.get_rank()))] * 3
    assert str(grid.mesh("tp").get_group().road("broadcast", 4)) == "gloo"
    return [f"{record.transport} {record.algorithm}" for record in log]


def test_roads_are_chosen_by_view(ranks):
    assert ranks(4, roads_by_view) == [["mpi shared", "gloo library", "mpi library"]] * 4


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ({"tq": "mpi"}, "there is no view 'tq' to choose roads for: there are replicate"),
        ({"tp": "mpi, gloo"}, "two roads for everything, mpi and gloo"),
        ({"tp": "all_sum=gloo"}, "there is no operation 'all_sum'"),
    ],
)
def test_roads_that_cannot_be_chosen(routes, words):
    with pytest.raises(ValueError, match=words):
        Layout(dp=2).build(routes=routes)
