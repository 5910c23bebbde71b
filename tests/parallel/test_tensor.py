"""Tensor parallelism beyond the matrix: logits, what cannot be split, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from echelon.models.bert import Bert, BertConfig
from echelon.models.gpt import GPT, GPTConfig
from echelon.models.llama import Llama, LlamaConfig
from echelon.parallel import tensor

GPT_CONFIG = GPTConfig(vocabulary=37, context=16, dim=16, layers=1, heads=4)
LLAMA_CONFIG = LlamaConfig(vocabulary=37, dim=16, layers=1, heads=8, kv_heads=2, mlp_dim=32, qkv_bias=True)
BERT_CONFIG = BertConfig(vocabulary=37, context=16, dim=16, layers=1, heads=4)
MODELS = {"gpt": (GPT, GPT_CONFIG), "llama": (Llama, LLAMA_CONFIG), "bert": (Bert, BERT_CONFIG)}


def logits_error(family: str, ranks: int) -> float:
    """Relative to one process, of the whole logits, which every rank has."""
    make, config = MODELS[family]
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(1))
    split = tensor.split(make(config).double(), init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    expected, got = make(config).double()(tokens), split(tokens)
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_whole_on_every_rank(ranks, family, size):
    assert max(ranks(size, logits_error, family, size)) < 1e-9


def refusal(change: dict[str, object], length: int = 8) -> str:
    model = GPT(replace(GPT_CONFIG, **change))
    try:
        split = tensor.split(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
        split(torch.zeros(1, length, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "length", "message"),
    [
        ({"dim": 18, "heads": 6}, 8, "tp=4 cannot split 6 heads, 6 kv heads: choose tp so that it divides them"),
        ({"mlp_dim": 30}, 8, "tp=4 cannot split an MLP of 30: choose tp so that it divides them"),
        ({"attention_dropout": 0.1}, 8, "attention dropout (0.1) is not possible with tensor parallelism"),
        ({"vocabulary": 9}, 8, "tp=4 cannot split a vocabulary of 9, too small for so many ranks"),
        ({}, 6, "a sequence of 6 tokens cannot be split over tp=4: use a length that 4 divides"),
        ({}, 8, ""),
    ],
    ids=["heads", "mlp", "dropout", "vocabulary", "length", "fits"],
)
def test_what_cannot_be_split_is_refused(ranks, change, length, message):
    for told in ranks(4, refusal, change, length):
        assert told.startswith(message)
        assert bool(told) == bool(message)


def unknown_token() -> bool:
    split = tensor.split(GPT(GPT_CONFIG), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    with pytest.raises(IndexError, match="a token is not one of the vocabulary's 37"):
        split(torch.full((1, 8), 37))
    return True


def test_a_token_beyond_the_vocabulary(ranks):
    assert all(ranks(2, unknown_token))


def test_a_mesh_of_one_changes_nothing(ranks):
    assert max(ranks(2, changes_of_one)) == 0


def changes_of_one() -> int:
    """How many parameters become DTensors over a mesh of one rank."""
    model = tensor.split(GPT(GPT_CONFIG), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"])
    return sum(hasattr(parameter, "placements") for parameter in model.parameters())
