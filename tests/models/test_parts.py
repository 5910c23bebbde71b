"""What parts promise to those who replace them, split them, recompute them or give them other dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from echelon import models
from echelon.models.bert import BertConfig
from echelon.models.gpt import GPTConfig
from echelon.models.llama import LlamaConfig
from echelon.models.parts import Attention, Rope, RopeScaling, attend
from echelon.models.resnet import ResNetConfig
from echelon.models.vit import ViTConfig

CONFIGS = {
    "gpt": GPTConfig(vocabulary=50, context=12, dim=24, layers=2, heads=4),
    "llama": LlamaConfig(vocabulary=50, dim=24, layers=2, heads=6, kv_heads=2, mlp_dim=30, qk_norm=True),
    "bert": BertConfig(vocabulary=50, context=12, dim=24, layers=2, heads=4),
    "vit": ViTConfig(classes=5, image=8, patch=4, dim=24, layers=2, heads=4),
    "resnet": ResNetConfig(classes=5, stem_dim=4, dims=(8, 16), depths=(1, 2)),
}
LANGUAGE = ["gpt", "llama", "bert"]
LENGTH = 12


def inputs(kind: str) -> Tensor:
    return torch.randint(50, (2, LENGTH)) if kind in LANGUAGE else torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("kind", CONFIGS)
def test_built_on_meta_and_filled_later(kind):
    ready = models.build(CONFIGS[kind])
    with torch.device("meta"):
        model = models.build(CONFIGS[kind])
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    model.initialize(0)
    assert [*model.state_dict()] == [*ready.state_dict()]
    for name, value in ready.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert not ready.tied or model.head.weight is model.tokens.weight


@pytest.mark.parametrize("kind", CONFIGS)
def test_first_values_depend_on_seed_and_name_alone(kind):
    """Not on the order, nor on which parameters exist, nor on how wide the drawing is."""
    first = models.build(CONFIGS[kind])
    torch.rand(7)
    second = models.build(CONFIGS[kind]).double()
    blocks = second.blocks if hasattr(second, "blocks") else second.stages
    kept = copy.deepcopy(blocks[1])
    second.initialize(seed=1)
    del blocks[0]
    blocks.insert(0, nn.Identity())
    second.initialize(seed=0)
    for name, value in blocks[1].state_dict().items():
        assert torch.equal(value, kept.state_dict()[name]), name
    other = models.build(CONFIGS[kind])
    other.initialize(seed=1)
    drawn = {name: value for name, value in first.named_parameters() if value.dim() > 1}
    assert drawn
    for name, value in drawn.items():
        assert not torch.equal(value, other.get_parameter(name)), name


def test_first_values_are_normal():
    """Of a GPT-2's: deviation, mean, tails, and no relation between rows, columns or parameters."""
    model = models.build("gpt2", layers=2, dim=384, vocabulary=500, context=16)
    qkv, down = model.blocks[0].attention.qkv.weight.double(), model.blocks[1].mlp.down.weight.double()
    for weight, deviation in ((qkv, 0.02), (down, 0.02 / 2)):
        unit = (weight / deviation).flatten()
        few = 5 / len(unit) ** 0.5
        assert unit.mean().abs() < few
        assert (unit.var() - 1).abs() < 2 * few
        assert (unit.pow(4).mean() - 3).abs() < 10 * few
        for share, bound in ((0.6827, 1), (0.9545, 2), (0.9973, 3)):
            assert ((unit.abs() < bound).double().mean() - share).abs() < few
    others = [qkv.roll(1, 0), qkv.roll(1, 1), model.blocks[1].attention.qkv.weight.double()]
    for other in others:
        assert (qkv * other).mean().abs() / 0.02**2 < 5 / qkv.numel() ** 0.5
    assert qkv.flatten().unique().numel() > 0.9 * qkv.numel()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_compiled_graph_is_whole(kind):
    """No break in the graph, in training with dropout too, and no new graph for each step."""
    more = {"dropout": 0.1, "attention_dropout": 0.1, "layers": 1} if kind in ("gpt", "bert", "vit") else {}
    model, given = models.build(CONFIGS[kind], **more), inputs(kind)
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    for step in range(3):
        model.place.step = step
        torch.testing.assert_close(compiled(given), model(given))
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["gpt", "llama", "bert", "vit"])
def test_the_attention_function_is_a_seam(kind):
    """It gets heads, keys and values, what is causal and the mask; what it returns goes on."""
    model, seen = models.build(CONFIGS[kind]), []

    def replaced(q: Tensor, k: Tensor, v: Tensor, **more: object) -> Tensor:
        seen.append((q.shape, k.shape, v.shape, more["causal"], more["mask_BS"], more["positions_S"]))
        return attend(q, k, v, **more)

    expected = model(inputs(kind).mul_(0))
    for block in model.blocks:
        block.attention.attend = replaced
    assert torch.equal(model(inputs(kind).mul_(0)), expected)
    heads, kv_heads = (6, 2) if kind == "llama" else (4, 4)
    length, head_dim = (5 if kind == "vit" else LENGTH), 24 // heads
    shapes = [torch.Size((2, count, length, head_dim)) for count in (heads, kv_heads, kv_heads)]
    assert seen == [(*shapes, kind in ("gpt", "llama"), None, None)] * 2


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_is_a_seam(kind):
    model = models.build(CONFIGS[kind])
    targets = torch.zeros(2, LENGTH, dtype=torch.long) if kind in LANGUAGE else torch.zeros(2, dtype=torch.long)
    seen = []
    model.head.loss = lambda hidden, weight, bias, targets: seen.append((hidden, weight, bias, targets)) or hidden.sum()
    model(inputs(kind), targets)
    ((hidden, weight, bias, given),) = seen
    assert hidden.shape == (*targets.shape, weight.shape[1])
    assert (weight is model.head.weight, bias is model.head.bias, given is targets) == (True, True, True)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_rows_of_whole_kv_heads_are_an_attention(kind):
    """Half of the rows of `qkv` and the matching columns of `out` give half of the sum: a split needs nothing else."""
    attention = models.build(CONFIGS[kind]).double().blocks[0].attention
    x_BSD = torch.randn(2, 7, 24, dtype=torch.float64)
    total = torch.zeros_like(x_BSD)
    for half in range(2):
        part = copy.deepcopy(attention)
        part.qkv.weight.data = attention.qkv.weight.data.chunk(2)[half]
        part.out.weight.data = attention.out.weight.data.chunk(2, 1)[half]
        if attention.qkv.bias is not None:
            part.qkv.bias.data = attention.qkv.bias.data.chunk(2)[half]
        if attention.out.bias is not None:
            part.out.bias = None
        total += part(x_BSD)
    total += 0 if attention.out.bias is None else attention.out.bias
    torch.testing.assert_close(total, attention(x_BSD), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_causal_goes_by_the_positions_given(kind):
    """The tokens in another order, each with its own position: the same results, in that order."""
    model, tokens_BS = models.build(CONFIGS[kind]).double(), inputs(kind)
    order = torch.randperm(LENGTH)
    expected = model(tokens_BS)
    torch.testing.assert_close(
        model(tokens_BS[:, order], positions_S=order), expected[:, order], rtol=1e-10, atol=1e-10
    )
    later = tokens_BS.clone()
    later[:, 8:] = 0
    torch.testing.assert_close(model(later)[:, :8], expected[:, :8], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [None, "padded"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_dropout_is_attention(causal, mask):
    """With weights made one by one and none dropped: what the fused kernel computes."""
    attention = Attention(24, 6, 2, 4, causal=causal, dropout=1e-9).double()
    mask_BS = None if mask is None else torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    x_BSD = torch.randn(2, 7, 24, dtype=torch.float64)
    torch.testing.assert_close(
        attention(x_BSD, mask_BS=mask_BS), attention.eval()(x_BSD, mask_BS=mask_BS), rtol=1e-8, atol=1e-8
    )


def test_rope_is_exact_in_any_dtype():
    """A model in bf16 rotates by angles that bf16 could not hold; one in fp64 by those of fp64."""
    rope, positions_S = Rope(500000.0, RopeScaling(8.0, 1.0, 4.0, 8192)), torch.tensor([0, 1, 4097, 8191])
    x_BHSD = torch.randn(1, 2, 4, 64, dtype=torch.float64).bfloat16().double()
    exact = rope.rotate(x_BHSD, positions_S)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.norm(dim=-1), x_BHSD.norm(dim=-1))
    torch.testing.assert_close(rope.rotate(x_BHSD.float(), positions_S).double(), exact, rtol=0, atol=5e-3)
    rounded = rope.rotate(x_BHSD.bfloat16(), positions_S)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), exact, rtol=2**-8, atol=5e-3)
    assert not list(models.build(CONFIGS["llama"]).buffers())


def test_rope_turns_by_the_difference_of_positions():
    rope = Rope(10000.0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def product(query: int, key: int) -> Tensor:
        turned = rope.rotate(q, torch.tensor([query])), rope.rotate(k, torch.tensor([key]))
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(5, 3), product(905, 903))
    assert not torch.isclose(product(5, 3), product(6, 3))


def test_errors_speak():
    with pytest.raises(ValueError, match="13 tokens, but the model has learned positions for 12: cut the sequence, or"):
        models.build(CONFIGS["gpt"])(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="6 query heads cannot share 4 key-value heads evenly"):
        models.build(CONFIGS["llama"], kv_heads=4)
    with pytest.raises(ValueError, match="patches of 3 pixels do not tile an image of 8"):
        models.build(CONFIGS["vit"], patch=3)
    with pytest.raises(ValueError, match=r"images of \(9, 9\) pixels, but the model takes 8 × 8"):
        models.build(CONFIGS["vit"])(torch.zeros(1, 3, 9, 9))
    with pytest.raises(ValueError, match="2 dims for 3 depths"):
        models.build(CONFIGS["resnet"], depths=(1, 1, 1))
