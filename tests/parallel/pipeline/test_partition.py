"""Where chains are cut: by bytes, operations, seconds, counts or costs; the best cut there is; what is refused."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from echelon.models.chain import Chain
from echelon.models.gpt import GPT, GPTConfig
from echelon.models.resnet import ResNet, ResNetConfig
from echelon.parallel.pipeline.partition import bytes_of, cut, linked, partition, times_of

GPT_CONFIG = GPTConfig(vocabulary=40, context=8, dim=16, layers=4, heads=2)


def widths(*sizes: int) -> nn.Sequential:
    """Links that turn each width into the next."""
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))


def tokens(device: str = "cpu") -> dict[str, Tensor]:
    given = torch.zeros(2, 8, dtype=torch.long, device=device)
    return {"tokens_BS": given, "targets_BS": given}


def test_memory_counts_bytes_of_parameters():
    model = widths(2, 8, 8, 2).double()
    assert bytes_of(linked(model)) == [2 * 8 * 8, 8 * 8 * 8, 8 * 2 * 8]
    assert partition(model, 2) == [range(1), range(1, 3)]


def test_what_two_links_share_counts_for_both():
    model = GPT(GPT_CONFIG)
    first, *_, last = bytes_of(model)
    assert model.config.tied
    assert min(first, last) > 40 * 16 * 4
    assert sum(bytes_of(model)) > sum(p.numel() * p.element_size() for p in model.parameters())


def test_time_counts_operations_on_the_meta_device():
    """Of both passes: three products a layer, of the first two, whose input needs no gradient."""
    with torch.device("meta"):
        model, example = widths(4, 8, 16, 2), (torch.empty(5, 4),)
    assert times_of(linked(model), example) == [2 * 2 * 5 * 4 * 8, 3 * 2 * 5 * 8 * 16, 3 * 2 * 5 * 16 * 2]
    assert partition(model, 2, "time", example=example) == [range(2), range(2, 3)]


def test_time_of_a_model_that_takes_its_arguments_by_name():
    with torch.device("meta"):
        model = GPT(GPT_CONFIG)
    first, *blocks, _ = times_of(model, tokens("meta"))
    assert first == 0
    assert len(set(blocks)) == 1
    assert partition(model, 3, "time", example=tokens("meta"))[0].stop >= 2


def test_time_is_measured_where_there_is_memory_and_leaves_the_model_as_it_was():
    model = ResNet(ResNetConfig(classes=5, stem_dim=4, dims=(4, 8), depths=(1, 2)))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    example = {"images_BCHW": torch.randn(2, 3, 16, 16), "targets_B": torch.zeros(2, dtype=torch.long)}
    costs = times_of(model, example)
    assert len(costs) == len(model.links())
    assert min(costs) > 0
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [link for span in partition(model, 3, "time", example=example) for link in span] == [*range(len(costs))]


def test_time_of_chains_with_skips_and_tuples():
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + 1

    chain = Chain(nn.Linear(2, 2), Both(), nn.Bilinear(2, 2, 2), Add(), skips=[(0, 3)])
    assert len(times_of(chain, (torch.ones(1, 2),))) == 4


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_counts_and_costs_are_taken_as_they_are():
    model = widths(2, 2, 2, 2, 2)
    assert partition(model, 2, [3, 1]) == [range(3), range(3, 4)]
    assert partition(model, 2, costs=[1, 1, 1, 9]) == [range(3), range(3, 4)]
    assert partition(model, 2, "time", costs=[9, 1, 1, 1]) == [range(1), range(1, 4)]


@pytest.mark.parametrize(
    ("stages", "balance", "more", "says"),
    [
        (4, "memory", {}, "Sequential is a chain of 3 links .* cut into 4 stages: use 1 to 3, or a deeper model"),
        (0, "memory", {}, "cut into 0 stages: use 1 to 3"),
        (2, [3], {}, r"balance=\[3\] for 2 stages of Sequential: it says how many links each stage gets"),
        (2, [1, 1], {}, r"balance=\[1, 1\] for 2 stages of Sequential: .* each at least 1, 3 in all"),
        (2, [3, 0], {}, r"balance=\[3, 0\] for 2 stages"),
        (2, [1.5, 1.5], {}, r"balance=\[1.5, 1.5\] for 2 stages"),
        (2, "size", {}, "balance='size': it is memory, time, or how many links each stage gets"),
        (2, "memory", {"costs": [1, 2]}, "2 costs for a chain of 3 links: each needs one"),
        (2, "memory", {"costs": [1, -2, 1]}, r"costs=\[1, -2, 1\]: what a link costs is 0 or more"),
        (2, "memory", {"costs": [1, float("nan"), 1]}, "what a link costs is 0 or more"),
        (2, "time", {}, 'balance="time" needs an example, the arguments of one microbatch: give it to `partition`'),
        (2, "time", {"example": (torch.empty(1, 2, device="meta"),)}, "both or neither must be on the meta device"),
    ],
)
def test_bad_input_is_told_what_would_do(stages, balance, more, says):
    with pytest.raises(ValueError, match=says):
        partition(widths(2, 2, 2, 2), stages, balance, **more)


class Backwards(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(self):
            x = module(x)
        return x


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), Backwards(nn.Linear(2, 2))])
def test_what_is_no_chain_is_refused(model):
    says = f"{type(model).__name__} is no chain of links: make it an nn.Sequential, or a Chain or Linked"
    with pytest.raises(ValueError, match=says):
        partition(model, 1)


def test_a_sequential_becomes_a_chain_with_its_names():
    relu = nn.ReLU()
    plain = nn.Sequential(OrderedDict(inward=nn.Linear(3, 4), bend=relu, outward=nn.Linear(4, 3), again=relu)).eval()
    chain, x = linked(plain), torch.randn(5, 3)
    assert isinstance(chain, Chain)
    assert chain.links() == [["inward"], ["bend"], ["outward"], ["again"]]
    assert list(chain.state_dict()) == list(plain.state_dict())
    assert chain.inward is plain.inward
    assert not chain.training
    assert torch.equal(chain(x), plain(x))
    assert linked(chain) is chain


def every_cut(count: int, stages: int) -> list[list[range]]:
    inner = itertools.combinations(range(1, count), stages - 1)
    return [[range(a, b) for a, b in itertools.pairwise([0, *places, count])] for places in inner]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[float], int]:
    costs = draw(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=8))
    return costs, draw(st.integers(1, len(costs)))


@given(cuts())
def test_no_cut_has_a_cheaper_dearest_stage_nor_then_a_more_even_rest(problem):
    costs, stages = problem

    def price(spans: list[range]) -> tuple[float, float]:
        sums = [sum(costs[link] for link in span) for span in spans]
        return max(sums), sum(each**2 for each in sums)

    assert price(cut(costs, stages)) == min(map(price, every_cut(len(costs), stages)))


def test_a_link_dearer_than_all_others_leaves_these_even():
    assert [len(span) for span in cut([50, *[1] * 8], 5)] == [1, 2, 2, 2, 2]


def test_no_stage_is_left_with_links_that_hold_nothing():
    spans = cut([100, 0, 1, 0, 1, 0], 3)
    assert [sum([100, 0, 1, 0, 1, 0][link] for link in span) for span in spans] == [100, 1, 1]
