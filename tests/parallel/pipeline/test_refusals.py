"""What the runtime says where something is wrong, and what `parallelize` says before any rank computes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from echelon.models.chain import Chain
from echelon.models.gpt import GPT, GPTConfig
from echelon.models.resnet import ResNet, ResNetConfig
from echelon.parallel.apply import Strategies, check, part_of
from echelon.parallel.layout import Layout, Stage
from tests.parallel.pipeline.refusals import said

EVERYWHERE = {
    "wrong_number": "ValueError: 1 microbatches for a schedule of 2: make one for so many",
    "wrong_number_forward": "ValueError: 4 microbatches for a schedule of 2: make one for so many",
    "other_group": "ValueError: a schedule of 4 ranks and 4 stages, but there are 2 ranks and 4 spans of links: make",
    "other_spans": "ValueError: a schedule of 2 ranks and 2 stages, but there are 2 ranks and 1 spans of links: make",
    "no_optimizer": "ValueError: pipedream updates while it runs: give `run` an optimizer",
    "no_optimizer_for_one": "ValueError: pipedream updates while it runs: give `run` an optimizer",
    "tied_versions": "ValueError: pipedream updates each stage by itself, so that no two can share",
    "nothing_held": "ValueError: rank .* of the pipeline holds no parameters: choose fewer stages, or another balance",
    "no_backward": "ValueError: this schedule of 1f1b has no backward passes: call `forward`",
    "list_given": "TypeError: argument 'sizes' of a microbatch is a list, .*: give tensors, or what does not change",
}
ON_THE_FIRST = {
    "other_shapes": "ValueError: link 0 gave .*shape=.2, 2.* for arguments of these shapes before, and now .*3, 2",
    "no_tensor": r"TypeError: link 0 gives \(a Tensor, a dict\) to 1: give a tensor, or a tuple of tensors",
}


@pytest.mark.parametrize("what", EVERYWHERE)
def test_every_rank_is_told(ranks, what):
    for told in ranks(2, said, what):
        assert re.match(EVERYWHERE[what], told), told


@pytest.mark.parametrize("what", ON_THE_FIRST)
def test_the_rank_that_sends_is_told(ranks, what):
    first, second = ranks(2, said, what)
    assert re.match(ON_THE_FIRST[what], first), first
    assert second == ""


def gpt(**changed: Any) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocabulary=40, context=8, dim=16, layers=2, heads=2, **changed))


def resnet() -> ResNet:
    with torch.device("meta"):
        return ResNet(ResNetConfig(classes=4, stem_dim=4, dims=(4, 8), depths=(1, 1)))


def tanhs() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Tanh(), nn.Linear(2, 2))


REFUSED = {
    "no chain": (nn.Linear(2, 2), {}, {}, "Linear is no chain of links: make it an nn.Sequential"),
    "more stages than links": (gpt(), {"pp": 8}, {}, "GPT is a chain of 4 links .* into 8 stages: use 1 to 4"),
    "chunks that are too many": (gpt(), {}, {"schedule": "interleaved", "chunks": 3}, "into 6 stages: use 1 to 4"),
    "chunks of a schedule without": (gpt(), {}, {"chunks": 2}, "1f1b has one stage a rank, but chunks=2: leave chunks"),
    "no chunk": (gpt(), {}, {"chunks": 0}, "1f1b with chunks=0: choose 1 or more"),
    "one chunk": (gpt(), {}, {"schedule": "interleaved"}, "several chunks a rank: choose chunks=2 or more, or 1f1b"),
    "odd": (gpt(), {"pp": 3}, {"schedule": "chimera"}, "an even number of ranks.* choose 2 or 4, or a schedule of one"),
    "counts": (gpt(), {}, {"balance": [2, 3]}, r"balance=\[2, 3\] for 2 stages of GPT: .* at least 1, 4 in all"),
    "balance": (gpt(), {}, {"balance": "bytes"}, "balance='bytes': it is memory, time, or how many links"),
    "time": (
        gpt(),
        {},
        {"balance": "time"},
        "needs an example.*: give it to `partition`, and as the balance elsewhere",
    ),
    "a stage that holds nothing": (
        tanhs(),
        {"pp": 3},
        {},
        r"Layout\(pp=3\): rank 1 of the pipeline would hold no parameters of Sequential: choose a smaller pp, or say",
    ),
    "local SGD": (
        gpt(),
        {"dp": 2},
        {"average_every": 2},
        r"sums gradients in every step: use average_every=0, or pp=1",
    ),
    "compiled": (gpt(), {}, {"schedule": "zero-bubble", "compile": True}, "use compile=False, or 1f1b"),
    "chimera × tp": (
        gpt(),
        {"tp": 2},
        {"schedule": "chimera"},
        r"tp=2\), stage 0: chimera goes with dp alone.*use 1f1b",
    ),
    "gems × cp": (gpt(), {"cp": 2}, {"schedule": "gems"}, r"cp=2\), stage 0: gems goes with dp alone, in stage 0"),
    "gems × shard": (
        gpt(),
        {"dp": 2},
        {"schedule": "gems", "stage": 1},
        "stage 1: gems goes with dp alone, in stage 0",
    ),
    "pipedream × tp": (gpt(tied=False), {"tp": 2}, {"schedule": "pipedream"}, "pipedream goes with dp alone"),
    "pipedream × shard": (
        gpt(),
        {"dp": 2},
        {"schedule": "pipedream-2bw", "stage": 3},
        "pipedream-2bw goes with dp alone",
    ),
    "versions × ties": (
        gpt(),
        {},
        {"schedule": "pipedream"},
        "no two can share tokens.weight and head.weight: use tied = false, or a synchronous schedule",
    ),
    "versions × fp16": (
        gpt(tied=False),
        {},
        {"schedule": "pipedream-2bw", "precision": "fp16"},
        "pipedream-2bw has no time to scale the loss for fp16: use bf16",
    ),
    "tokens × tiles": (gpt(), {"sp": 2}, {}, "GPT has sequences of tokens and no images that sp could cut: use cp"),
    "tiles × tp": (resnet(), {"sp": 2, "tp": 2}, {}, "tiles, and stages that differ, go with dp and pp, and not with"),
    "tiles × shard": (resnet(), {"sp": 2, "dp": 2}, {"stage": 1}, "tiles go with stage = 0, compile = false"),
    "tiles × zero-bubble": (resnet(), {"sp": 2}, {"schedule": "zero-bubble"}, "zero-bubble does not go with tiles"),
    "crews × chimera": (
        resnet(),
        {"pp": 1, "stages": [Stage(sp=2), Stage()]},
        {"schedule": "chimera"},
        "chimera has each rank compute in an order of its own.* use gems or gems-gpipe",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_pipeline_cannot_do_is_told_before(what):
    model, degrees, how, says = REFUSED[what]
    with pytest.raises(ValueError, match=says):
        check(model, Layout(**{"pp": 2} | degrees), Strategies(**how))


def test_a_schedule_that_there_is_not():
    with pytest.raises(ValueError, match="schedule='gpip' is none of gpipe, 1f1b, interleaved, zero-bubble"):
        Strategies(schedule="gpip")


def test_too_few_microbatches():
    interleaved = Strategies(schedule="interleaved", chunks=2)
    with pytest.raises(ValueError, match=r"interleaved on 2 ranks needs a multiple of 2 microbatches.* choose 2$"):
        part_of(gpt(), Layout(pp=2), interleaved, 0, 1)


def test_a_stage_may_have_links_that_hold_nothing():
    check(tanhs(), Layout(pp=2), Strategies(balance=[2, 2]))


def test_what_stands_in_a_chain_is_checked_as_a_model_is():
    check(Chain(nn.Linear(2, 2), nn.Linear(2, 2)), Layout(pp=2, dp=2), Strategies(schedule="chimera"))
    with pytest.raises(ValueError, match="Chain has no `blocks` of attention and MLP that tp could split"):
        check(Chain(nn.Linear(2, 2), nn.Linear(2, 2)), Layout(pp=2, tp=2), Strategies())
