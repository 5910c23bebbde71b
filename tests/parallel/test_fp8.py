"""Products in 8 bits stand within their rounding of what they replace, and what cannot be multiplied so is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from echelon.models.presets import build
from echelon.parallel import apply, fp8
from echelon.parallel.apply import Strategies
from echelon.parallel.layout import Layout
from echelon.parallel.loss import chunked_cross_entropy
from echelon.train.build import choose_device
from echelon.train.config import ConfigError
from tests.parallel.test_loss import error, inputs, loss_and_gradients, whole
from tests.train.runs import config

ROUNDING = 0.12  # of gradients with two bits after the point, in norm
FP8 = {"precision": "bf16", "fp8": True}
SMALL: dict[str, Any] = {"vocabulary": 96, "context": 32, "dim": 32, "layers": 2, "heads": 4}


MLPS = {
    "GPT": lambda: build("gpt2", **SMALL).blocks[0].mlp,
    "BERT": lambda: build("bert-base", **SMALL).blocks[0].mlp,
    "Llama": lambda: build("llama2-7b", **SMALL, mlp_dim=96).blocks[0].mlp,
}


def in_fp8(mlp: nn.Module) -> nn.Module:
    """The same MLP as that of a model's only block."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Module()])
    model.blocks[0].mlp = copy.deepcopy(mlp)
    return fp8.convert(model).blocks[0].mlp


def errors_of_an_mlp(name: str, device: str = "cpu", scale: float = 1.0, tokens: int = 64) -> dict[str, float]:
    """Of the output and of all gradients, against the same in fp64."""
    torch.manual_seed(0)
    exact = MLPS[name]().bfloat16()
    for parameter in exact.parameters():
        parameter.data.normal_(std=0.2)
    low = in_fp8(exact).to(device)
    exact.double()
    x, grad = (torch.randn(2, tokens // 2, SMALL["dim"]).bfloat16() for _ in range(2))
    found = {}
    for mlp, given, of_out in ((low, x * scale, grad), (exact, (x * scale).double(), grad.double())):
        leaf = given.to(next(mlp.parameters()).device).requires_grad_()
        out = mlp(leaf)
        out.backward(of_out.to(out.device))
        results = {"output": out.detach(), "input": leaf.grad}
        results |= {each: parameter.grad for each, parameter in mlp.named_parameters()}
        found = {each: error(found[each].cpu(), result) for each, result in results.items()} if found else results
    return found


@pytest.mark.parametrize("scale", [1e-6, 1.0, 4.0])
@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_is_what_it_was_within_rounding(name: str, scale: float) -> None:
    errors = errors_of_an_mlp(name, scale=scale)
    assert 0 < max(errors.values()) < ROUNDING, errors


def test_zeros_stay_zeros() -> None:
    found = fp8.factor(torch.zeros(16, 32), fp8.VALUES)
    assert not found.plain_MN.float().any()
    assert found.turned_NM.shape == (32, 16)
    assert found.scale.isfinite()


@pytest.mark.parametrize("name", MLPS)
def test_what_is_not_finite_is_not_hidden(name: str) -> None:
    x = torch.ones(16, 32).bfloat16()
    x[3, 3] = torch.inf
    assert not in_fp8(MLPS[name]().bfloat16())(x).isfinite().all()


@pytest.mark.parametrize("name", MLPS)
def test_single_tokens_are_multiplied_as_before(name: str) -> None:
    mlp = MLPS[name]().bfloat16()
    x = torch.randn(1, 3, 32).bfloat16()
    assert torch.equal(in_fp8(mlp)(x), mlp(x))


@pytest.mark.parametrize("rows", [64, 50, 7])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_loss_is_what_it_was_within_rounding(rows: int, bias: bool) -> None:
    given = inputs(rows, 48, 32, bias, torch.bfloat16)
    got = loss_and_gradients(functools.partial(chunked_cross_entropy, chunk=20, in_fp8=True), *given)
    exact = loss_and_gradients(whole, *(x if x is None else x.double() for x in given[:3]), given[3])
    assert error(got[0], exact[0]) < 0.02
    assert 0 < max(error(x, y) for x, y in zip(got[1:], exact[1:], strict=True)) < ROUNDING


def test_a_model_keeps_its_parameters_and_learns() -> None:
    tokens = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(1))
    losses = {}
    for low in (False, True):
        model = build("gpt2", **SMALL).bfloat16()
        names = [name for name, _ in model.named_parameters()]
        model.head.loss = functools.partial(chunked_cross_entropy, chunk=32, in_fp8=low)
        if low:
            fp8.convert(model)
        assert [name for name, _ in model.named_parameters()] == names
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(30):
            loss = model(tokens[:, :-1], tokens[:, 1:]) / 64
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[low] = loss.item()
    assert losses[False] < 2
    assert abs(losses[True] - losses[False]) < 0.05


@pytest.mark.parametrize(
    ("name", "changed", "layout", "told"),
    [
        ("gpt2", {"vocabulary": 97}, Layout(), r"97 outputs: give it 112 .*`vocabulary`"),
        ("gpt2", {"dim": 40}, Layout(), "dim is 40"),
        ("gpt2", {"mlp_dim": 100}, Layout(), "MLP's up is 100"),
        ("gpt2", {}, Layout(tp=2), "fp8 is for tp=1"),
    ],
)
def test_what_cannot_be_multiplied_so_is_refused(name: str, changed: Any, layout: Layout, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        apply.check(build(name, **SMALL | changed), layout, Strategies(precision="bf16", fp8=True))


def test_images_without_blocks_are_refused() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="nor multiply in fp8"):
        apply.check(build("resnet18"), Layout(), Strategies(precision="bf16", fp8=True))


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    asked = {chosen: config(train={"device": chosen}, strategies=FP8) for chosen in ("cpu", "cuda")}
    assert choose_device(asked["cpu"]).type == "cpu"
    with pytest.raises(ConfigError, match=r"8\.9 or later, and A100 is older"):
        choose_device(asked["cuda"])


def test_other_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="not in fp32"):
        Strategies(fp8=True)
