"""Models that are split for inference give the logits of one process, from plain tensors that each rank alone reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import echelon
from echelon import models
from echelon.models import files, hub
from echelon.models.gpt import GPTConfig
from echelon.models.llama import LlamaConfig
from echelon.models.presets import Config
from echelon.parallel import shards
from tests.models.test_hub_ranks import ORIGINAL, Counted

CONFIGS: dict[str, Config] = {
    "gpt": GPTConfig(vocabulary=64, context=16, dim=16, layers=2, heads=4, dropout=0.1, attention_dropout=0.1),
    "gpt, not tied": GPTConfig(vocabulary=61, context=16, dim=16, layers=1, heads=4, tied=False),
    "llama": LlamaConfig(vocabulary=64, dim=16, layers=2, heads=4, mlp_dim=24, out_bias=True, mlp_bias=True),
    "qwen2": LlamaConfig(vocabulary=63, dim=16, layers=1, heads=8, kv_heads=4, mlp_dim=24, qkv_bias=True, tied=True),
    "qwen3": LlamaConfig(vocabulary=61, dim=16, layers=1, heads=4, kv_heads=2, head_dim=8, mlp_dim=24, qk_norm=True),
    "two kv heads": LlamaConfig(vocabulary=61, dim=16, layers=2, heads=8, kv_heads=2, mlp_dim=24, qkv_bias=True),
    "one kv head": LlamaConfig(vocabulary=62, dim=16, layers=1, heads=8, kv_heads=1, mlp_dim=24, tied=True),
}
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}
BATCH, LENGTH = 2, 6


def filled(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A whole model none of whose parameters is all zeros or ones, as biases and norms are at first."""
    model = models.build(CONFIGS[kind])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.to(dtype).eval()


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return models.build(CONFIGS[kind])


def tokens() -> Tensor:
    return torch.randint(61, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def error(split: nn.Module, whole: nn.Module, first: bool) -> float:
    """Of the logits, on the group's first rank, and of the loss, on all; relative to those of one process."""
    given, targets = tokens(), tokens().roll(-1, 1)
    with torch.no_grad():
        logits, expected = split(given), whole(given)
        losses = split(given, targets), whole(given, targets)
    wrong = abs((losses[0] / losses[1]).item() - 1)
    if not first:
        assert logits.shape == (BATCH, LENGTH, 0)
        return wrong
    assert logits.shape == expected.shape
    assert logits.is_contiguous()
    return max(wrong, ((logits - expected).norm() / expected.norm()).item())


def errors(dtype: torch.dtype) -> dict[str, float]:
    first = dist.get_rank() == 0
    return {
        kind: error(shards.shard(filled(kind, dtype), dist.group.WORLD), filled(kind, dtype), first) for kind in CONFIGS
    }


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_logits_and_loss_are_those_of_one_process(ranks, size, dtype):
    for told in ranks(size, errors, dtype):
        assert {kind: wrong for kind, wrong in told.items() if wrong > ROUNDING[dtype]} == {}


def errors_in_subgroups() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    split = [shards.shard(filled("two kv heads"), mesh[name].get_group()) for name in ("dp", "tp")]
    return max(error(each, filled("two kv heads"), place == 0) for each, place in zip(split, mesh.get_coordinate()))


def test_groups_that_are_not_the_world(ranks):
    assert max(ranks(4, errors_in_subgroups)) < ROUNDING[torch.float64]


def loaded(kind: str, folder: str) -> tuple[float, int, int]:
    """The error, the bytes read, and the bytes held."""
    files.safe_open, Counted.read = Counted, 0
    try:
        split = shards.load(on_meta(kind), dist.group.WORLD, lambda model: hub.load_into(model, folder))
    finally:
        files.safe_open = ORIGINAL
    held = sum(parameter.untyped_storage().nbytes() for parameter in split.parameters())
    return error(split, filled(kind, torch.float32), dist.get_rank() == 0), Counted.read, held


@pytest.mark.parametrize("kind", ["gpt", "qwen3", "two kv heads"])
def test_each_rank_reads_its_slices_of_a_folder(ranks, tmp_path, kind):
    model = filled(kind, torch.float32)
    hub.save(model, tmp_path / "model")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for wrong, read, held in ranks(2, loaded, kind, str(tmp_path / "model")):
        assert wrong < ROUNDING[torch.float32]
        assert read == held < 0.6 * whole


def test_ranks_that_share_a_kv_head_read_no_other(ranks, tmp_path):
    model: Any = filled("two kv heads", torch.float32)
    hub.save(model, tmp_path / "model")
    queries, width, dim = 4, 2, 16
    unneeded = len(model.blocks) * queries // 2 * width * (dim + 1) * 4  # the other sharer's queries, with their bias
    for wrong, read, held in ranks(4, loaded, "two kv heads", str(tmp_path / "model")):
        assert wrong < ROUNDING[torch.float32]
        assert read == held + unneeded


def first_values() -> bool:
    """A model that is made by parts holds what a whole one is cut into, in plain tensors with memory of their own."""
    made = shards.load(on_meta("one kv head"), dist.group.WORLD, lambda model: model.initialize(seed=3))
    whole = models.build(CONFIGS["one kv head"])
    whole.initialize(seed=3)
    cut = dict(shards.shard(whole, dist.group.WORLD).named_parameters())
    for name, parameter in made.named_parameters():
        assert not isinstance(parameter, DTensor)
        assert not parameter.requires_grad
        assert torch.equal(parameter, cut[name]), name
        assert cut[name].untyped_storage().nbytes() == cut[name].nbytes
    return made.head.weight is made.tokens.weight


def test_made_by_parts_or_cut_is_the_same(ranks):
    assert all(ranks(4, first_values))


def sent(kind: str, rows: int) -> list[tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]]:
    """What is sent in a forward pass, with the logits of all tokens and of some rows, and what is expected."""
    config, size = CONFIGS[kind], dist.get_world_size()
    split: Any = shards.shard(filled(kind, torch.float32), dist.group.WORLD)
    shape = (config.layers, BATCH * LENGTH, config.dim, config.vocabulary, size, 4)
    with torch.no_grad(), echelon.comm.record() as of_all:
        split(tokens())
    with torch.no_grad(), echelon.comm.record() as of_some:
        split.head(split(tokens(), hidden=True).flatten(0, 1)[:rows])
    return [(seen(of_all), shards.traffic(*shape)), (seen(of_some), shards.traffic(*shape, rows))]


def seen(log: Any) -> dict[str, tuple[int, int]]:
    calls, payload = Counter(record.operation for record in log), Counter()
    for record in log:
        payload[record.operation] += record.payload
    return {name: (calls[name], payload[name]) for name in calls}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["gpt", "two kv heads"])
def test_what_is_sent_is_what_was_predicted(ranks, kind, size):
    for of_a_rank in ranks(size, sent, kind, 3):
        for observed, expected in of_a_rank:
            assert observed == expected


def test_one_process_holds_all(tmp_path: Path):
    expected = filled("qwen3", torch.float32)
    hub.save(expected, tmp_path / "model")
    model = shards.load(
        on_meta("qwen3"), None, lambda model: hub.load_into(model, tmp_path / "model"), dtype=torch.float64
    )
    assert torch.equal(model(tokens()), expected.double()(tokens()))
    assert not model.training
    assert shards.traffic(2, 12, 16, 64, 1, 4) == {}


def refusal() -> str:
    with pytest.raises(ValueError, match="tp=") as error:
        shards.shard(models.build(GPTConfig(vocabulary=9, context=8, dim=18, layers=1, heads=6)), dist.group.WORLD)
    return str(error.value)


def test_what_cannot_be_split_is_refused(ranks):
    expected = (
        "tp=4 cannot split a vocabulary of 9, too small for so many ranks, 6 heads, 6 kv heads: choose tp so that"
    )
    for told in ranks(4, refusal):
        assert told.startswith(expected)
