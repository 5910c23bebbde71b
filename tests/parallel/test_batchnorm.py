"""Batch normalisation over ranks equals one process on the whole batch, whatever each rank's part of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import echelon.comm
from echelon.parallel import batchnorm

EXACT = 1e-9
STEPS = 3
SIZES = {"even": (3, 3, 3, 3), "uneven": (5, 1, 2, 4), "one empty": (4, 0, 1, 6)}
LAYERS = {
    "1d": (nn.BatchNorm1d, {}, ()),
    "1d of sequences": (nn.BatchNorm1d, {}, (5,)),
    "2d": (nn.BatchNorm2d, {}, (3, 2)),
    "3d": (nn.BatchNorm3d, {}, (2, 3, 2)),
    "cumulative": (nn.BatchNorm2d, {"momentum": None}, (3, 2)),
    "not affine": (nn.BatchNorm2d, {"affine": False}, (3, 2)),
    "no bias": (nn.BatchNorm2d, {}, (3, 2)),
    "not tracking": (nn.BatchNorm2d, {"track_running_stats": False}, (3, 2)),
    "other constants": (nn.BatchNorm2d, {"momentum": 0.3, "eps": 0.1}, (3, 2)),
}
CHANNELS = 4


def world(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in norm; 0 for two zeros."""
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


def layer(name: str, dtype: torch.dtype) -> nn.Module:
    kind, options, _ = LAYERS[name]
    torch.manual_seed(2)
    module = kind(CHANNELS, **options)
    if name == "no bias":
        module.bias = None
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.to(dtype)


def batches(name: str, size: int, offset: float = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = STEPS, size, CHANNELS, *LAYERS[name][2]
    return list(torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 0.5 + offset)


def trained(module: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, gradients of inputs and parameters, and buffers after some steps in training and one in evaluation."""
    results = {}
    for step, x in enumerate(inputs):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        (out**3).sum().backward()
        results |= {f"output {step}": out.detach(), f"gradient {step}": leaf.grad}
    results |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    results |= dict(module.named_buffers())
    module.eval()
    return {name: tensor.detach().clone() for name, tensor in results.items()} | {
        "evaluated": module(inputs[0]).detach()
    }


def own_part(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return x.split(list(sizes))[dist.get_rank()]


def errors(name: str, sizes: tuple[int, ...], device: str = "cpu") -> dict[str, float]:
    """Of this rank's part of all that is computed, against one process in fp64."""
    whole = [x.to(device) for x in batches(name, sum(sizes))]
    expected = trained(layer(name, torch.float64).to(device), whole)
    module = layer(name, torch.float64).to(device)
    names = list(module.state_dict())
    parameters = list(module.parameters())
    synchronized = batchnorm.synchronize(module, world(device))
    assert list(synchronized.state_dict()) == names
    assert all(new is old for new, old in zip(synchronized.parameters(), parameters, strict=True))
    got = trained(synchronized, [own_part(x, sizes) for x in whole])
    assert got.keys() == expected.keys()
    differences = {}
    for key, value in got.items():
        if key.startswith("gradient of"):
            dist.all_reduce(value)
        per_sample = key.startswith(("output", "evaluated", "gradient")) and not key.startswith("gradient of")
        differences[key] = error(value, own_part(expected[key], sizes) if per_sample else expected[key])
    return differences


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("name", LAYERS)
def test_it_equals_one_process(ranks: Any, name: str, sizes: tuple[int, ...]) -> None:
    for differences in ranks(4, errors, name, sizes):
        assert {key: value for key, value in differences.items() if value > EXACT} == {}


def test_two_ranks(ranks: Any) -> None:
    for differences in ranks(2, errors, "2d", (3, 4)):
        assert max(differences.values()) < EXACT


class Net(nn.Module):
    """Normalisation inside a net, one of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
        self.shared = nn.BatchNorm2d(CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.conv(self.shared(self.stem(x)))).tanh()


def net_errors() -> dict[str, float]:
    whole = torch.randn(6, 3, 5, 5, dtype=torch.float64)

    def gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        (net(x) ** 2).sum().backward()
        return {name: parameter.grad for name, parameter in net.named_parameters()} | dict(net.named_buffers())

    nets = []
    for _ in range(2):
        torch.manual_seed(4)
        nets.append(Net().double())
    expected = gradients(nets[0], whole)
    got = gradients(batchnorm.synchronize(nets[1], world()), own_part(whole, (4, 2)))
    for name in dict(nets[1].named_parameters()):
        dist.all_reduce(got[name])
    # The gradient of a bias before a normalisation is zero but for rounding: it is measured by the others' size.
    return {
        name: float((got[name] - value).double().norm() / max(value.double().norm(), 1))
        for name, value in expected.items()
    }


def test_a_net_equals_one_process(ranks: Any) -> None:
    for differences in ranks(2, net_errors):
        assert {key: value for key, value in differences.items() if value > EXACT} == {}


def far_errors(dtype: torch.dtype, offset: float) -> tuple[float, float]:
    """Where the mean is much larger than the deviation: this rank's error, and that of one process in that dtype."""
    sizes = 5, 3
    low = [x.to(dtype) for x in batches("2d", sum(sizes), offset)]
    exact = trained(layer("2d", torch.float64), [x.double() for x in low])["output 0"]
    one_process = trained(layer("2d", dtype), low)["output 0"]
    got = trained(batchnorm.synchronize(layer("2d", dtype), world()), [own_part(x, sizes) for x in low])["output 0"]
    assert got.dtype == dtype
    return error(got, own_part(exact, sizes)), error(one_process, exact)


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_a_mean_far_from_zero_costs_no_more_than_on_one_process(ranks: Any, offset: float) -> None:
    for over_ranks, on_one in ranks(2, far_errors, torch.float32, offset):
        assert over_ranks < 2 * on_one + 1e-6
        assert over_ranks < 1e-6 * offset


def test_bf16(ranks: Any) -> None:
    for over_ranks, _ in ranks(2, far_errors, torch.bfloat16, 0):
        assert over_ranks < 1e-2


def mixed_precision() -> tuple[torch.dtype, torch.dtype, float]:
    """bf16 activations with fp32 parameters, as autocast has them."""
    whole = batches("2d", 6)[0].bfloat16()
    module = batchnorm.synchronize(layer("2d", torch.float32), world())
    out = module(own_part(whole, (3, 3)))
    out.sum().backward()
    exact = layer("2d", torch.float64)(whole.double())
    return out.dtype, module.weight.grad.dtype, error(out.detach(), own_part(exact, (3, 3)).detach())


def test_activations_may_be_of_lower_precision_than_parameters(ranks: Any) -> None:
    for out, gradient, difference in ranks(2, mixed_precision):
        assert (out, gradient) == (torch.bfloat16, torch.float32)
        assert difference < 1e-2


def recorded(dtype: torch.dtype) -> list[dict[str, int]]:
    module = batchnorm.synchronize(layer("2d", dtype), world())
    x = own_part(batches("2d", 6)[0].to(dtype), (3, 3)).requires_grad_()
    with echelon.comm.record() as forward:
        out = module(x)
    with echelon.comm.record() as backward:
        out.sum().backward()
    sent = [Counter[str](), Counter[str]()]
    for log, bytes_sent in zip((forward, backward), sent, strict=True):
        for record in log:
            bytes_sent[record.operation] += record.payload
    return [dict(counter) for counter in sent]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_is_sent_is_what_is_said(ranks: Any, dtype: torch.dtype) -> None:
    said = list(batchnorm.traffic(CHANNELS, 2, dtype.itemsize))
    assert ranks(2, recorded, dtype) == [said, said]
    assert batchnorm.traffic(CHANNELS, 1, 4) == ({}, {})


def single_value() -> str:
    module = batchnorm.synchronize(nn.BatchNorm1d(2), world())
    with pytest.raises(ValueError, match="more than one value") as caught:
        module(torch.zeros(1 if dist.get_rank() == 0 else 0, 2))
    return str(caught.value)


def test_a_single_value_has_no_deviation(ranks: Any) -> None:
    assert len(set(ranks(2, single_value))) == 1
