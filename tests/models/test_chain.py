"""Chains of links: what a span computes, what is left of a model that has kept some, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from echelon import models
from echelon.models.chain import Apart, Chain, Linked
from tests.models.test_parts import CONFIGS


class Add(nn.Module):
    def forward(self, *each: Tensor) -> Tensor:
        return torch.stack(each).sum(0)


def chain() -> Chain:
    return Chain(nn.Linear(2, 2), nn.Tanh(), Add(), nn.Linear(2, 2), Add(), skips=[(0, 2), (1, 4)])


@pytest.mark.parametrize("skip", [(0, 1), (2, 2), (3, 1), (-1, 2), (1, 5), (3, 9)])
def test_a_skip_jumps_forth_over_a_module(skip):
    with pytest.raises(ValueError, match=r"skip \(.*\): it jumps over at least one of modules 0 to 4"):
        Chain(*(nn.Identity() for _ in range(5)), skips=[skip])


def test_a_skip_is_given_once():
    with pytest.raises(ValueError, match=r"skip \(0, 2\) is given more than once"):
        Chain(nn.Identity(), nn.Identity(), Add(), skips=[(0, 2), (0, 2)])


def test_edges_cross_where_a_span_begins_and_ends():
    model = chain()
    assert model.edges() == [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (1, 4)]
    assert model.crossing(range(5)) == ([], [])
    assert model.crossing(range(2)) == ([], [(1, 2), (0, 2), (1, 4)])
    assert model.crossing(range(2, 4)) == ([(1, 2), (0, 2)], [(3, 4)])
    assert model.crossing(range(4, 5)) == ([(3, 4), (1, 4)], [])


@pytest.mark.parametrize("spans", [[1, 4], [2, 3], [1, 1, 1, 1, 1]])
def test_spans_one_after_the_other_are_the_whole(spans):
    model, x, start, values = chain(), torch.randn(3, 2), 0, {}
    for count in spans:
        span = range(start, start + count)
        into, _ = model.crossing(span)
        out = model.compute(span, (x,), {edge: values[edge] for edge in into})
        values |= out if span.stop < 5 else {}
        start = span.stop
    assert torch.equal(out, model(x))
    assert model.span is None


def test_what_is_kept_keeps_its_name_and_its_number():
    model = chain()
    before = dict(model.state_dict())
    model.keep([[range(2)], [range(2, 5)]], rank=1)
    assert {*model.state_dict()} == {"3.weight", "3.bias"}
    assert torch.equal(model.state_dict()["3.weight"], before["3.weight"])
    assert [model.parts(link) for link in range(5)] == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert copy.deepcopy(model).crossing(range(2, 5)) == ([(1, 2), (0, 2), (1, 4)], [])
    given = {edge: torch.ones(1, 2) for edge in model.crossing(range(2, 5))[0]}
    assert model.compute(range(2, 5), (), given).shape == (1, 2)


def test_a_rank_may_keep_several_spans():
    model = Chain(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
    model.keep([[range(1), range(2, 3)], [range(1, 2), range(3, 4)]], rank=0)
    assert [*model.state_dict()] == ["0.weight", "2.weight"]


def test_a_module_may_come_twice():
    shared, relu, x = nn.Linear(2, 2), nn.ReLU(), torch.randn(3, 2)
    model = Chain(shared, relu, shared, relu)
    assert model.links() == [["0"], ["1"], ["2"], ["3"]]
    assert torch.equal(model(x), relu(shared(relu(shared(x)))))
    assert model.shared() == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]


@pytest.mark.parametrize(("rank", "name"), [(0, "0.weight"), (2, "2.weight")])
def test_who_shares_a_parameter_with_other_ranks_knows_them(rank, name):
    tied = nn.Linear(2, 2, bias=False)
    model = Chain(tied, nn.Linear(2, 2), tied)
    assert model.shared() == [["0.weight", "2.weight"]]
    model.keep([[range(1)], [range(1, 2)], [range(2, 3)]], rank)
    assert model.apart == {name: Apart("0.weight", (0, 2), leads=rank == 0)}


@pytest.mark.parametrize(("held", "rank"), [([[range(3)]], 0), ([[range(1)], [range(1, 2)], [range(2, 3)]], 1)])
def test_who_shares_with_nobody_else_does_not(held, rank):
    tied = nn.Linear(2, 2, bias=False)
    model = Chain(tied, nn.Linear(2, 2), tied)
    model.keep(held, rank)
    assert model.apart == {}


def test_copies_of_the_same_stages_share_nothing_apart():
    """Both ranks of a bidirectional pipeline hold both names: what is tied is one parameter on each."""
    tied = nn.Linear(2, 2, bias=False)
    model = Chain(tied, tied)
    model.keep([[range(1), range(1, 2)]] * 2, 1)
    assert model.apart == {}


def test_within_are_the_children_of_the_span():
    model = models.build(CONFIGS["gpt"])
    assert [*model.within("blocks")] == ["0", "1"]
    model.span = range(2, 3)
    assert [*model.within("blocks")] == ["1"]
    assert not model.ends
    model.span = range(2, 4)
    assert model.ends
    model.span = range(1)
    assert model.within("blocks") == {}


def test_a_model_takes_its_arguments_by_name():
    model = models.build(CONFIGS["gpt"])
    with pytest.raises(TypeError, match="GPT takes its arguments by name: give a mapping for each microbatch"):
        model.compute(range(1), (torch.zeros(1, 4, dtype=torch.long),), {})
    assert model.span is None


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_names_each_parameter_in_one_link(family):
    model = models.build(CONFIGS[family])
    assert isinstance(model, Linked)
    parts = [part for names in model.links() for part in names]
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert len([part for part in parts if name == part or name.startswith(f"{part}.")]) == 1, name
