"""The choice of a road is a pure function of the call and the table; what cannot be is refused with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm import roads
from echelon.comm.levels import Levels
from echelon.comm.routes import (
    ALGORITHMS,
    EXCHANGED,
    OPERATIONS,
    SIZED,
    TRANSPORTS,
    UNSIZED,
    NoRoute,
    Place,
    Road,
    Router,
    Routes,
    Rule,
    Table,
    default,
    obstacle,
    roads_for,
)

MIB = 2**20
MPI, GLOO, NCCL = (Road(name) for name in TRANSPORTS)
ROADS = [Road(t, a) for t in ("mpi", "gloo") for a in ("", *ALGORITHMS)]


def rule(operation: str = "all_reduce", ranks: int = 4, nodes: int = 1, **fields) -> Rule:
    steps = fields.pop("steps", ((0, GLOO),))
    return Rule(operation, ranks, nodes, steps, **fields)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    operation = draw(st.sampled_from(OPERATIONS))
    ranks = draw(st.integers(1, 16))
    bounds = sorted(draw(st.sets(st.integers(1, 2**26), max_size=4))) if operation in SIZED else []
    serving = [road for road in ROADS if road.serves(operation)]
    steps = tuple((start, draw(st.sampled_from(serving))) for start in [0, *bounds])
    return Rule(operation, ranks, draw(st.integers(1, ranks)), steps, "cpu", draw(st.booleans()))


@pytest.mark.parametrize("road", [*ROADS, NCCL])
def test_a_road_is_read_as_it_is_written(road):
    assert Road.parse(str(road)) == road


@pytest.mark.parametrize("text", ["", "ucx", "mpi+", "mpi+tree", "+ring", "nccl+ring", "mpi+ring+ring", "MPI"])
def test_what_is_no_road(text):
    with pytest.raises(NoRoute, match="there is no road"):
        Road.parse(text)


def test_steps_begin_at_their_size():
    table = Table((rule(steps=((0, MPI), (1024, GLOO), (MIB, Road("mpi", "ring")))),))
    routes = Routes(table, {}, "cpu", Place(4, 1))
    found = [str(routes.road("all_reduce", size)) for size in (0, 1023, 1024, MIB - 1, MIB, 2**40)]
    assert found == ["mpi", "mpi", "gloo", "gloo", "mpi+ring", "mpi+ring"]


def test_the_nearest_rule_of_the_same_kind_holds():
    """On one node, with one rank on each of several, with several on each: none stands for another."""
    inside = [rule(ranks=ranks, steps=((0, Road("mpi", name)),)) for ranks, name in ((2, "ring"), (8, "shared"))]
    across = rule(ranks=4, nodes=4)
    table = Table((*inside, across))

    def road(ranks: int, nodes: int) -> str:
        return str(Routes(table, {}, "cpu", Place(ranks, nodes)).road("all_reduce", 4))

    assert [road(ranks, 1) for ranks in (2, 3, 4, 5, 64)] == [
        "mpi+ring",
        "mpi+ring",
        "mpi+ring",
        "mpi+shared",
        "mpi+shared",
    ]
    assert (road(2, 2), road(16, 16), road(8, 2)) == ("gloo", "gloo", "mpi")


def test_low_precision_has_rules_of_its_own_or_those_of_others():
    plain, low = rule(), rule(low=True, steps=((0, Road("mpi", "shared")),))
    for held, expected in (((plain, low), "mpi+shared"), ((plain,), "gloo"), ((low,), "mpi+shared")):
        routes = Routes(Table(held), {}, "cpu", Place(4, 1))
        assert str(routes.road("all_reduce", 4, low=True)) == expected
        assert str(routes.road("all_reduce", 4)) == ("gloo" if plain in held else "mpi")


def test_the_default():
    """NCCL for CUDA tensors where every rank has a GPU of its own; else MPI, or Gloo without an MPI world."""
    own = Place(4, 1, own_gpus=True)
    assert {default(operation, "cuda", own) for operation in OPERATIONS if operation != "barrier"} == {((0, NCCL),)}
    assert default("all_gather", "cpu", own) == default("all_gather", "cuda", Place(4, 1)) == ((0, MPI),)
    assert default("all_gather", "cpu", Place(4, 2, mpi=False)) == ((0, GLOO),)
    assert default("all_gather", "cuda", Place(4, 2, mpi=False)) == ((0, NCCL),)
    exchange = Road("mpi", "exchange")
    assert default("reduce_scatter", "cpu", own) == ((0, MPI), (EXCHANGED["reduce_scatter"], exchange))
    assert default("all_reduce", "cpu", Place(4, 2)) == ((0, MPI),)
    assert default("all_reduce", "cpu", Place(4, 4)) == ((0, MPI), (MIB, exchange))


@pytest.mark.parametrize(
    ("road", "device", "place", "reason"),
    [
        (NCCL, "cpu", Place(2, 1, own_gpus=True), "NCCL moves CUDA tensors"),
        (NCCL, "cuda", Place(2, 1), "ranks share one, or have none"),
        (MPI, "cpu", Place(2, 1, mpi=False), "no MPI world"),
        (Road("mpi", "shared"), "cpu", Place(4, 2), "choose mpi.two-level"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_called(road, device, place, reason):
    for table, chosen in ((Table(everywhere=road), {}), (Table(), {"all_reduce": road})):
        routes = Routes(table, chosen, device, place)
        with pytest.raises(NoRoute, match=f"all_reduce cannot go over .*{reason}"):
            routes.road("all_reduce", 4)
        assert obstacle(road, "all_reduce", device, place)
    assert routes.road("broadcast", 4)  # which was not chosen


def test_a_road_for_everything_is_its_transport_where_the_algorithm_ends():
    routes = Routes(Table(everywhere=Road("gloo", "ring")), {}, "cpu", Place(4, 2))
    assert {str(routes.road(operation, 0)) for operation in ALGORITHMS["ring"]} == {"gloo+ring"}
    assert {str(routes.road(operation, 0)) for operation in set(OPERATIONS) - set(ALGORITHMS["ring"])} == {"gloo"}


def test_choices_come_before_the_table():
    router = Router(Table((rule(),)), Place(4, 1))
    router.choose(roads_for("", {"all_reduce": "mpi+ring", "message": "gloo"}))
    assert [str(router.on_cpu.road(name, 4)) for name in ("all_reduce", "message", "broadcast")] == [
        "mpi+ring",
        "gloo",
        "mpi",
    ]
    router.choose({})
    assert str(router.on_cpu.road("all_reduce", 4)) == "gloo"
    with pytest.raises(ValueError, match="this tensor is on meta"):
        router.on("meta")


@pytest.mark.parametrize(
    ("operations", "wrong"),
    [
        ({"allreduce": "mpi"}, "there is no operation 'allreduce'"),
        ({"broadcast": "mpi+ring"}, "mpi.ring has no broadcast: it has all_reduce"),
        ({"all_reduce": "mpi+quick"}, "there is no road"),
    ],
)
def test_choices_that_cannot_be(operations, wrong):
    with pytest.raises(NoRoute, match=wrong):
        roads_for("", operations)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"operation": "all_sum"}, "no operation 'all_sum'"),
        ({"device": "tpu"}, "no device 'tpu'"),
        ({"nodes": 5}, "4 ranks cannot be on 5 nodes"),
        ({"nodes": 0}, "cannot be on 0 nodes"),
        ({"steps": ()}, "must begin at 0"),
        ({"steps": ((4, MPI),)}, "must begin at 0"),
        ({"steps": ((0, MPI), (8, GLOO), (8, MPI))}, "rise"),
        ({"operation": "gather", "steps": ((0, MPI), (8, GLOO))}, "one road for all sizes"),
        ({"operation": "reduce", "steps": ((0, Road("mpi", "ring")),)}, "has no reduce"),
    ],
)
def test_rules_that_cannot_be(fields, wrong):
    with pytest.raises(NoRoute, match=wrong):
        rule(**fields)


@given(st.lists(rules(), max_size=6))
def test_a_table_is_read_as_it_is_written(held):
    table = Table(tuple(held), about={"date": "2026-01-01", "machine": {"cores": 2}})
    again = Table.from_text(table.to_text())
    assert (again, again.digest, again.about) == (table, table.digest, table.about)


@given(st.lists(rules(), max_size=6), st.lists(rules(), max_size=6))
def test_digests_are_equal_where_the_routes_are(one, other):
    assert (Table(tuple(one)).digest == Table(tuple(other)).digest) == (one == other)


@given(
    st.lists(rules(), max_size=12),
    st.sampled_from(OPERATIONS),
    st.integers(0, 2**30),
    st.booleans(),
    st.integers(1, 16),
    st.data(),
)
def test_every_call_has_a_road_that_serves_it(held, operation, size, low, ranks, data):
    """And the same one wherever the table has been."""
    place = Place(ranks, data.draw(st.integers(1, ranks)))
    table = Table(tuple(held))
    found = []
    for same in (table, Table.from_text(table.to_text())):
        try:
            found.append(Routes(same, {}, "cpu", place).road(operation, size, low))
        except NoRoute as error:
            assert place.nodes > 1  # only shared memory can be refused here
            found.append(str(error))
    assert found[0] == found[1]
    assert isinstance(found[0], str) or found[0].serves(operation)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "not JSON"),
        ("[]", "no table of routes"),
        ('{"rules": []}', "no table of routes"),
        ('{"echelon routes": 2, "rules": []}', "of this version"),
        ('{"echelon routes": 1, "rules": [7]}', "a rule needs operation, ranks, nodes and steps"),
        ('{"echelon routes": 1, "rules": [{"operation": "reduce"}]}', "has not"),
        ('{"echelon routes": 1, "machine": "mine", "rules": []}', "not described by names"),
        (
            '{"echelon routes": 1, "rules": [{"operation": "reduce", "ranks": "four", "nodes": 1, "steps": []}]}',
            "has not",
        ),
        (
            '{"echelon routes": 1, "rules": [{"operation": "reduce", "ranks": 2, "nodes": 1, "steps": [[0]]}]}',
            "has not",
        ),
        (
            '{"echelon routes": 1, "rules": [{"operation": "reduce", "ranks": 2, "nodes": 1, "steps": [[0, "x"]]}]}',
            "'x'",
        ),
    ],
)
def test_tables_that_cannot_be_read(text, wrong):
    with pytest.raises(NoRoute, match=wrong):
        Table.from_text(text)


def test_what_an_algorithm_is_said_to_have_it_has():
    levels = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert {name: set(having) for name, having in ALGORITHMS.items()} == {
        "exchange": set(roads._EXCHANGE),
        "ring": set(roads._RING),
        "two-level": levels,
        "shared": levels,
    }
    assert all(callable(getattr(Levels, name)) for name in levels)
    assert set(SIZED).isdisjoint(UNSIZED)


def test_what_carries_messages_is_open_before_the_first():
    """Also of CUDA tensors over the host; but for NCCL, which opens by itself."""

    def carriers(place: Place, **roads: Road) -> list[str]:
        rules = tuple(rule("message", device=device, steps=((0, road),)) for device, road in roads.items())
        return Router(Table(rules), place).carriers_of_messages

    assert carriers(Place(4, 1)) == carriers(Place(4, 1, own_gpus=True)) == ["mpi"]
    assert carriers(Place(4, 1), cpu=GLOO) == carriers(Place(4, 1), cuda=GLOO) == ["mpi", "gloo"]
    assert carriers(Place(4, 1, mpi=False)) == carriers(Place(4, 1, mpi=False), cpu=MPI) == ["gloo"]
    assert Router(Table(everywhere=NCCL), Place(4, 1, own_gpus=True)).carriers_of_messages == ["mpi"]
