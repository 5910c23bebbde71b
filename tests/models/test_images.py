"""Models of images: as large as their authors say, whole where a pipeline cuts them, and of any size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from echelon import models
from echelon.models.amoebanet import AmoebaNetConfig
from echelon.models.resnet import ResNetConfig
from echelon.models.unet import UNetConfig

CONFIGS = {
    "resnet": ResNetConfig(classes=5, stem_dim=4, dims=(8, 16), depths=(1, 2)),
    "resnet of small images": ResNetConfig(5, 3, 4, (4, 8, 16), (1, 2, 1), bottleneck=False, small_stem=True),
    "resnet v2": ResNetConfig(classes=5, stem_dim=4, dims=(8, 16), depths=(2, 1), version=2),
    "resnet v2 of small images": ResNetConfig(5, 3, 4, (4, 8), (2, 1), bottleneck=False, version=2, small_stem=True),
    "amoebanet": AmoebaNetConfig(classes=5, layers=3, filters=8),
    "unet": UNetConfig(classes=5, dim=4, depth=3),
}
SIDES = (45, 38)


def arguments(kind: str, sides: tuple[int, int] = SIDES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, *sides, generator=generator, dtype=torch.float64)
    shape = (2, *sides) if kind == "unet" else (2,)
    name = "targets_BHW" if kind == "unet" else "targets_B"
    return {"images_BCHW": images, name: torch.randint(5, shape, generator=generator)}


def parameters(config: Any, **overrides: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in models.build(config, **overrides).parameters())


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet110", 1.7), ("resnet164-v2", 1.7), ("resnet1001-v2", 10.3), ("unet", 31.0)]
)
def test_presets_are_as_large_as_published(name, millions):
    assert round(parameters(name) / 1e6, 1) == millions


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_resnets_of_small_images_are_as_large_as_published(depth, millions):
    found = parameters("resnet110", depths=((depth - 2) // 6,) * 3)
    assert found / 1e6 == pytest.approx(millions, rel=0.02)  # the paper's shortcuts have no parameters


@pytest.mark.parametrize(
    ("layers", "filters", "millions"), [(18, 208, 82), (18, 416, 318), (18, 544, 542), (36, 544, 1050), (72, 512, 1800)]
)
def test_amoebanets_are_as_large_as_gpipe_has_them(layers, filters, millions):
    assert parameters("amoebanet-d", layers=layers, filters=filters) / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize("name", ["resnet110", "resnet110-v2", "resnet164-v2", "resnet1001-v2"])
def test_a_resnet_has_as_many_layers_as_its_name_says(name):
    with torch.device("meta"):
        model: Any = models.build(name)
    kept = [name for name, weight in model.named_parameters() if weight.dim() > 1 and "shortcut" not in name]
    assert len(kept) == int(name.removeprefix("resnet").removesuffix("-v2"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_reach_every_parameter(kind):
    model = models.build(CONFIGS[kind]).double()
    model(**arguments(kind)).backward()
    assert [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()] == []


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_a_model_gives(kind):
    model, given = models.build(CONFIGS[kind]).double().eval(), arguments(kind)
    images, targets = given.values()
    logits = model(images)
    assert logits.shape == ((2, 5, *SIDES) if kind == "unet" else (2, 5))
    expected = functional.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(model(**given), expected)
    assert model(images, hidden=True).shape[:1] == (2,)


def computed(model: Any, given: dict[str, Tensor], cuts: tuple[int, ...]) -> tuple[Tensor, dict[Any, Any]]:
    """Span after span, each with leaves as from another rank; the gradients of these go back."""
    links, sent, taken = len(model.links()), {}, {}
    for span in itertools.starmap(range, itertools.pairwise((0, *cuts, links))):
        into, out = model.crossing(span)
        received = {edge: _leaves(sent[edge]) for edge in into}
        taken |= received
        gave = model.compute(span, given, received)
        if span.stop < links:
            assert {*gave} == {*out}
            sent |= gave
    gave.backward()
    for edge in sorted(sent, key=lambda edge: edge[0], reverse=True):
        outputs, leaves = _tensors(sent[edge]), _tensors(taken[edge])
        torch.autograd.backward(outputs, [leaf.grad for leaf in leaves], retain_graph=True)
    return gave, {name: each.grad for name, each in model.named_parameters()}


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _leaves(value: Any) -> Any:
    leaves = tuple(each.detach().requires_grad_() for each in _tensors(value))
    return leaves if isinstance(value, tuple) else leaves[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_chain_may_be_cut_anywhere(kind):
    whole, given = models.build(CONFIGS[kind]).double(), arguments(kind)
    links = len(whole.links())
    expected = whole(**given)
    expected.backward()
    everywhere = tuple(range(1, links))
    for cuts in [*((cut,) for cut in everywhere), everywhere]:
        model = models.build(CONFIGS[kind]).double()
        loss, gradients = computed(model, given, cuts)
        assert torch.equal(loss, expected)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=f"{name}, cut at {cuts}")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("cut", [1, 4])
def test_ranks_keep_their_parts(kind, cut):
    whole, given = models.build(CONFIGS[kind]).double(), arguments(kind)
    links = len(whole.links())
    first, last = (models.build(CONFIGS[kind]).double() for _ in range(2))
    spans = [range(cut), range(cut, links)]
    for rank, model in enumerate((first, last)):
        model.keep([[span] for span in spans], rank)
    assert {*first.state_dict()} | {*last.state_dict()} == {*whole.state_dict()}
    assert not {*first.state_dict()} & {*last.state_dict()}
    assert torch.equal(last.compute(spans[1], given, first.compute(spans[0], given, {})), whole(**given))


@pytest.mark.parametrize("kind", ["amoebanet", "unet"])
@pytest.mark.parametrize("sides", [(32, 32), (33, 47), (1, 5)])
def test_images_of_any_size(kind, sides):
    model = models.build(CONFIGS[kind]).double()
    given = arguments(kind, sides)
    assert model(**given).isfinite()
    if kind == "unet":
        assert model(given["images_BCHW"]).shape == (2, 5, *sides)


def test_pixels_without_a_class_do_not_count():
    model, given = models.build(CONFIGS["unet"]).double().eval(), arguments("unet")
    images, targets = given.values()
    top, bottom = targets.clone(), targets.clone()
    top[:, 20:], bottom[:, :20] = -100, -100
    torch.testing.assert_close(model(images, top) + model(images, bottom), model(images, targets))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AmoebaNetConfig(layers=4), "layers=4 cannot be shared by three stages evenly"),
        (AmoebaNetConfig(filters=12), "filters=12: take a multiple of 8"),
        (ResNetConfig(version=3), "version 3: there are 1 and 2"),
    ],
)
def test_what_cannot_be_built_says_why(config, message):
    with pytest.raises(ValueError, match=message):
        models.build(config)
