"""Tiled equals untiled: outputs, gradients of inputs and weights, and buffers, whatever layer, grid and sizes."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.models.resnet import ResNet, ResNetConfig
from echelon.parallel import spatial
from echelon.parallel.layout import Layout
from echelon.parallel.spatial.cut import Window, beyond, bounds, parcels, within
from tests.launch.jobs import ROOT, echelon

EXACT = 1e-10
GRIDS = [(4,), (1, 4), (2, 2), (4, 1)]
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(grid: tuple[int, ...]) -> DeviceMesh:
    if grid not in _meshes:
        _meshes[grid] = init_device_mesh("cpu", grid, mesh_dim_names=("rows", "columns")[: len(grid)])
    return _meshes[grid]


class Functional(nn.Module):
    """A function with some of its arguments, as a layer."""

    def __init__(self, function: Any, *arguments: Any, **named: Any) -> None:
        super().__init__()
        self._function, self._arguments, self._named = function, arguments, named

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._function(x, *self._arguments, **self._named)
        return out


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not expected.numel():
        return 0.0
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


def worst_errors(cases: bytes) -> list[dict[str, float]]:
    """Of each layer, grid and shape: how far tiled and untiled are from each other."""
    _meshes.clear()  # those of another test's groups
    return [_errors(*case) for case in pickle.loads(cases)]


def _errors(layer: nn.Module, grid: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    plain, tiled = layer, spatial.tile(copy.deepcopy(layer), mesh_of(grid))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    given, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, got = plain(whole), tiled(given)
    if isinstance(got, spatial.Tile):
        assert got.shape == expected.shape
        got = spatial.gather(got)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * upstream).sum().backward()
    (got * upstream).sum().backward()
    found = {"output": error(got.detach(), expected.detach())}
    dist.all_reduce(given.grad)
    found["input"] = error(given.grad, whole.grad)
    for (name, ours), theirs in zip(tiled.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        found[name] = error(ours.grad, theirs.grad)
    for (name, ours), theirs in zip(tiled.named_buffers(), plain.buffers(), strict=True):
        found[name] = error(ours, theirs)
    return found


def check(ranks: Any, cases: list[Any]) -> None:
    (size,) = {math.prod(grid) for _, grid, _ in cases}
    for found in ranks(size, worst_errors, pickle.dumps(cases)):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors.values()) < EXACT, (case, errors)


small = st.integers(1, 3)
pairs = st.tuples(small, small)
sizes = st.tuples(st.integers(1, 2), st.just(4), st.integers(1, 19), st.integers(1, 19))
grids = st.sampled_from(GRIDS)


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Module:
    kernel, stride, dilation = draw(st.tuples(st.integers(1, 5), st.integers(1, 5))), draw(pairs), draw(pairs)
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    padding: Any = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    if stride == (1, 1) and draw(st.booleans()):
        padding = "same"
    return nn.Conv2d(
        4,
        draw(st.sampled_from([2, 4])),
        kernel,
        stride,
        padding,
        dilation,
        draw(st.sampled_from([1, 2])),
        draw(st.booleans()),
        mode,
    ).double()


@st.composite
def transposed(draw: st.DrawFn) -> nn.Module:
    stride, dilation = draw(pairs), draw(pairs)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    kernel, padding = draw(st.tuples(st.integers(1, 5), st.integers(1, 5))), draw(st.tuples(small, small))
    groups = draw(st.sampled_from([1, 2]))
    return nn.ConvTranspose2d(4, 4, kernel, stride, padding, extra, groups, draw(st.booleans()), dilation).double()


@st.composite
def poolings(draw: st.DrawFn) -> nn.Module:
    kernel, stride, ceil = draw(pairs), draw(pairs), draw(st.booleans())
    padding = tuple(draw(st.integers(0, each // 2)) for each in kernel)
    if draw(st.booleans()):
        return nn.MaxPool2d(kernel, stride, padding, draw(pairs), ceil_mode=ceil)
    override = draw(st.sampled_from([None, None, 3]))
    return nn.AvgPool2d(kernel, stride, padding, ceil, draw(st.booleans()), override)


@st.composite
def resizings(draw: st.DrawFn) -> nn.Module:
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic"]))
    aligned = draw(st.booleans()) if mode.startswith("bi") else None
    if draw(st.booleans()):
        size = draw(st.tuples(st.integers(1, 25), st.integers(1, 25)))
        return Functional(F.interpolate, size=size, mode=mode, align_corners=aligned)
    factor = draw(st.tuples(*[st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.7, 3.0])] * 2))
    again = draw(st.booleans())
    return Functional(
        F.interpolate, scale_factor=factor, mode=mode, align_corners=aligned, recompute_scale_factor=again
    )


@st.composite
def paddings(draw: st.DrawFn) -> nn.Module:
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    low = -2 if mode == "constant" else 0
    pad = draw(st.tuples(*[st.integers(low, 4)] * 4))
    value = {"value": draw(st.sampled_from([0.0, 1.5]))} if mode == "constant" else {}
    return Functional(F.pad, pad, mode, **value)


def computable(case: tuple[nn.Module, tuple[int, ...], tuple[int, ...]]) -> bool:
    """By one process: PyTorch refuses some sizes, and so may we; of windows that see nothing but padding it writes the
    gradients anywhere.
    """
    layer, _, shape = case
    try:
        out = layer(torch.zeros(shape, dtype=torch.float64))
    except (RuntimeError, ValueError):
        return False
    return bool(out.numel() and out.isfinite().all())


@pytest.mark.parametrize(
    "layers", [convolutions, transposed, poolings, resizings, paddings], ids=lambda each: str(each.__name__)
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_layers(ranks: Any, layers: Any) -> None:
    @settings(max_examples=8, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(st.lists(st.tuples(layers(), grids, sizes).filter(computable), min_size=20, max_size=20))
    def compare(cases: list[Any]) -> None:
        check(ranks, cases)

    compare()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_tiles_with_neighbours_on_both_sides_and_across_corners(ranks: Any) -> None:
    layers, grid = st.one_of(convolutions(), poolings()), st.sampled_from([(2, 3), (3, 2)])

    @settings(max_examples=4, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(st.lists(st.tuples(layers, grid, sizes).filter(computable), min_size=20, max_size=20))
    def compare(cases: list[Any]) -> None:
        check(ranks, cases)

    compare()


def test_tiles_too_narrow_for_a_window(ranks: Any) -> None:
    """Of the first, a rank sends rows that it computes nothing of; of the second, some see nothing but padding."""
    first = nn.Conv2d(4, 2, (3, 4), (2, 1), (0, 2), (2, 2)).double()
    second = nn.Conv2d(4, 2, 1, (1, 3), (0, 1)).double()
    check(ranks, [(first, (2, 2), (1, 4, 14, 7)), (second, (2, 2), (1, 4, 15, 5))])


class Cell(nn.Module):
    """What models do between layers: sums, products, slices of channels and of the image, channels put together, and
    what is to have no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.squeeze = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.left(x).chunk(2, 1)
        gate = self.squeeze(x.mean((2, 3)))[:, :, None, None].sigmoid()
        shifted = F.relu(self.right(x[:, :, 1:, 1:]), inplace=True)
        joined = torch.cat([first, 2 - second, F.pad(shifted, (0, 1, 1, 0))], 1)
        joined += 0.5
        return torch.cat([joined[:, :4] * gate, -joined[:, 4:] * joined[:, 4:].detach()], 1)


OTHERS: dict[str, Any] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm, cumulative, not affine": lambda: nn.BatchNorm2d(4, momentum=None, affine=False),
    "batch norm, evaluated": lambda: nn.BatchNorm2d(4).eval(),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4),
    "instance norm, tracking": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "adaptive average": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "adaptive average of all": lambda: nn.AdaptiveAvgPool2d(1),
    "adaptive largest": lambda: nn.AdaptiveMaxPool2d((2, 3)),
    "adaptive largest of many equal ones": lambda: nn.Sequential(nn.ReLU(), nn.AdaptiveMaxPool2d((2, None))),
    "mean": lambda: Functional(Tensor.mean, (2, 3)),
    "sum": lambda: Functional(torch.sum, dim=(2, 3), keepdim=True),
    "mean of all": lambda: Functional(torch.mean),
    "flattened": lambda: nn.Sequential(nn.Conv2d(4, 2, 3, padding=1), nn.Flatten()),
    "smooth": lambda: nn.Sequential(nn.SiLU(), nn.GELU(), nn.Hardswish(), nn.LeakyReLU(0.2), nn.PReLU(4), nn.ELU()),
    "cell": Cell,
    "strided": lambda: nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)),
}


def test_other_layers(ranks: Any) -> None:
    shapes = [(2, 4, 12, 8), (2, 4, 7, 9), (1, 4, 3, 17)]
    cases = [(make().double(), grid, shape) for make in OTHERS.values() for grid in GRIDS for shape in shapes]
    check(ranks, cases)


def of_pixels(grid: tuple[int, ...]) -> list[float]:
    """A loss of each pixel, inside a model and behind it; some pixels do not count."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(2, 3, 10, 13, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, 5, (2, 10, 13), generator=generator)
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    plain = nn.Conv2d(3, 5, 3, padding=1).double()
    dist.broadcast(plain.weight.detach(), 0)
    dist.broadcast(plain.bias.detach(), 0)
    wrong = []
    for options in ({}, {"weight": weights}, {"reduction": "sum"}):
        tiled, untiled = spatial.tile(copy.deepcopy(plain), mesh_of(grid)), copy.deepcopy(plain)
        loss = F.cross_entropy(tiled(images), labels, ignore_index=-1, **options)
        expected = F.cross_entropy(untiled(images), labels, ignore_index=-1, **options)
        loss.backward()
        expected.backward()
        dist.all_reduce(tiled.weight.grad)
        wrong += [error(loss.detach(), expected.detach()), error(tiled.weight.grad, untiled.weight.grad)]
    return wrong


def of_pixels_on_all_grids() -> list[float]:
    _meshes.clear()
    return [wrong for grid in GRIDS for wrong in of_pixels(grid)]


def test_a_loss_of_each_pixel(ranks: Any) -> None:
    for found in ranks(4, of_pixels_on_all_grids):
        assert max(found) < EXACT


def twice() -> float:
    """The gradient of a graph that is kept, after it has gone back once more."""
    _meshes.clear()
    x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    out = spatial.gather(spatial.tile(nn.Conv2d(2, 2, 1, stride=3).double(), mesh_of((4,)))(x))
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x)
    return error(second, first)


def test_a_graph_can_go_back_twice(ranks: Any) -> None:
    assert ranks(4, twice) == [0.0] * 4


def with_data_parallelism() -> dict[str, float]:
    """Two tiles each of two images: BatchNorm's statistics are of both images, and gradients add up over all ranks."""
    grid = Layout(dp=2, sp=2).build()
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    for parameter in plain.parameters():
        dist.broadcast(parameter.detach(), 0)
    tiled = spatial.tile(copy.deepcopy(plain), grid.mesh("sp"), grid.mesh("data").get_group())
    generator = torch.Generator().manual_seed(6)
    images, upstream = (torch.randn(2, channels, 11, 8, generator=generator).double() for channels in (3, 2))
    upstream, mine = upstream[:, :, 1:-1, 1:-1], grid.mesh("dp").get_local_rank()
    given = spatial.cut(images[mine : mine + 1], grid.mesh("sp"))
    got, expected = spatial.gather(tiled(input=given)), plain(images)
    (got * upstream[mine : mine + 1]).sum().backward()
    (expected * upstream).sum().backward()
    found = {"output": error(got.detach(), expected[mine : mine + 1].detach())}
    for (name, ours), theirs in zip(tiled.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        found[name] = error(ours.grad, theirs.grad)
    for (name, ours), theirs in zip(tiled.named_buffers(), plain.buffers(), strict=True):
        found[name] = error(ours, theirs)
    return found


def test_beside_data_parallelism(ranks: Any) -> None:
    for found in ranks(4, with_data_parallelism):
        assert max(found.values()) < EXACT, found


STEPS = 5


def trained(grid: tuple[int, ...]) -> dict[str, float]:
    """A ResNet that learns from a few images, in one process and in tiles: losses, weights and buffers."""
    settings = {"classes": 5, "stem_dim": 4, "dims": (8, 12), "depths": (1, 2), "bottleneck": True}
    plain = ResNet(ResNetConfig(**settings))  # type: ignore[arg-type]
    plain.initialize()
    plain = plain.double()
    tiled = spatial.tile(copy.deepcopy(plain), mesh_of(grid))
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(STEPS, 4, 3, 45, 38, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (STEPS, 4), generator=generator)
    found = {}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, tiled)]
    for step in range(STEPS):
        losses = [model(images[step], labels[step]) for model in (plain, tiled)]
        for model, loss, optimizer in zip((plain, tiled), losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            if model is tiled:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
        found[f"loss {step}"] = error(losses[1].detach(), losses[0].detach())
    for (name, ours), theirs in zip(tiled.state_dict().items(), plain.state_dict().values(), strict=True):
        found[name] = error(ours, theirs)
    return found


def trained_on_all_grids() -> dict[str, float]:
    _meshes.clear()
    return {f"{name} {grid}": wrong for grid in GRIDS for name, wrong in trained(grid).items()}


def test_a_whole_resnet_learns_the_same(ranks: Any) -> None:
    for found in ranks(4, trained_on_all_grids):
        assert len(found) > 100
        assert max(found.values()) < EXACT, max(found, key=lambda name: found[name])


REFUSED: dict[str, Any] = {
    r"1 \(LayerNorm\): layer_norm cannot be tiled: it looks at more than one pixel": lambda: nn.LayerNorm(8),
    r"1 \(Functional\): max_pool2d_with_indices cannot be tiled: it looks at more than one pixel": lambda: Functional(
        F.max_pool2d, 2, return_indices=True
    ),
    r"1 \(Functional\): cat cannot be tiled: along dimension 2, which is cut": lambda: Functional(
        lambda x: torch.cat([x, x], 2)
    ),
    r"1 \(Functional\): sum cannot be tiled: along dimensions \(2,\)": lambda: Functional(torch.sum, dim=2),
    r"1 \(Functional\): view cannot be tiled": lambda: Functional(Tensor.view, 2, -1),
    r"1 \(Functional\): indexing cannot be tiled: in steps": lambda: Functional(lambda x: x[:, :, ::2]),
    r"1 \(Functional\): add cannot be tiled: a tensor of \[3\] fits no image": lambda: Functional(
        torch.add, torch.zeros(3)
    ),
    r"1 \(Functional\): interpolate cannot be tiled: by area": lambda: Functional(F.interpolate, size=3, mode="area"),
    r"1 \(Dropout\): dropout cannot be tiled": lambda: nn.Dropout(0.5),
    r"1 \(Functional\): cross_entropy cannot be tiled: only of classes": lambda: Functional(
        F.cross_entropy, torch.ones(2, 4, 8, 8)
    ),
    r"1 \(Conv2d\): a window of 9 rows, 1 apart, does not fit into 8 rows": lambda: nn.Conv2d(4, 4, 9),
}


def refusals() -> list[str]:
    _meshes.clear()
    told = []
    dropout = spatial.tile(nn.Dropout(0.5), mesh_of((2, 2)))
    dropout.eval()(torch.ones(2, 4, 8, 8))  # drops nothing, and does not make it welcome in training
    for make in REFUSED.values():
        model = spatial.tile(nn.Sequential(nn.ReLU(), make()), mesh_of((2, 2)))
        with pytest.raises(spatial.SpatialError) as caught:
            model(torch.ones(2, 4, 8, 8))
        told.append(str(caught.value))
    return told


def test_what_cannot_be_tiled_is_refused_by_name(ranks: Any) -> None:
    for told in ranks(4, refusals):
        for pattern, text in zip(REFUSED, told, strict=True):
            assert re.search(pattern, text), text


# The arithmetic


@given(st.integers(0, 300), st.integers(1, 9))
def test_cut(length: int, tiles: int) -> None:
    parts = bounds(length, tiles)
    assert [row for part in parts for row in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 40), st.builds(Window, *[st.integers(1, 4)] * 2, *[st.integers(0, 4)] * 2, st.integers(1, 3)))
def test_windows_see_what_they_compute_from(length: int, window: Window) -> None:
    if length + window.before + window.after <= window.dilation * (window.kernel - 1):
        with pytest.raises(ValueError, match="does not fit into"):
            window.outputs(length)
        return
    x = torch.arange(1.0, length + 1)[None, None]
    padded = F.pad(x, (window.before, window.after))
    rows = padded.unfold(2, window.dilation * (window.kernel - 1) + 1, window.stride)[0, 0]
    assert window.outputs(length) == len(rows)
    for output, row in enumerate(rows):
        seen = window.sees(range(output, output + 1))
        inside, (before, after) = within(seen, length), beyond(seen, length)
        assert len(seen) == before + len(inside) + after
        assert row.tolist() == [0] * before + [at + 1 for at in inside] + [0] * after


@given(st.data())
def test_parcels_bring_what_is_wanted(data: st.DataObject) -> None:
    length, tiles = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    ends = st.tuples(st.integers(0, length - 1), st.integers(1, length))
    ranges = st.builds(lambda pair: range(min(pair), max(*pair, min(pair) + 1)), ends)
    wanted = tuple(tuple(data.draw(st.lists(ranges, max_size=3))) for _ in range(tiles))
    held = bounds(length, tiles)
    got = [[[-1] * len(piece) for piece in pieces] for pieces in wanted]
    for (source, target), each in parcels(length, wanted).items():
        for parcel in each:
            for row in range(parcel.count):
                assert got[target][parcel.piece][parcel.place + row] == -1, "nothing comes twice"
                got[target][parcel.piece][parcel.place + row] = held[source][parcel.start + row]
    assert got == [[list(piece) for piece in pieces] for pieces in wanted]


def test_the_example() -> None:
    job = echelon("run", "-n", 4, ROOT / "examples" / "tiles.py", "--tiles", 2, 2, "--side", 121, timeout=240)
    assert job.returncode == 0, job.stderr
    [(loss, alone, error)] = re.findall(r"loss (\S+), of one process (\S+); gradients differ by (\S+)", job.stdout)
    assert loss == alone
    assert float(error) < EXACT
    [share] = re.findall(r"a rank saves (\S+) of what one process does", job.stdout)
    assert float(share) < 0.5
