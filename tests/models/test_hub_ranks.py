"""Models that are split over real ranks are filled and saved as whole ones are; each rank reads only what it holds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from echelon import models
from echelon.models import files, hub
from echelon.models.gpt import GPTConfig
from echelon.models.llama import LlamaConfig
from echelon.models.presets import Config

CONFIGS: dict[str, Config] = {
    "gpt": GPTConfig(vocabulary=62, context=16, dim=24, layers=2, heads=4),
    "llama": LlamaConfig(vocabulary=61, dim=24, layers=2, heads=4, kv_heads=2, mlp_dim=30, qkv_bias=True),
}
SHARDED: tuple[tuple[Placement, ...], ...] = ((Shard(0),), (Shard(1),), (Replicate(),))
ON_TWO_AXES = ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(0)))


class Counted:
    """A file of safetensors, with every byte counted that is taken out of it."""

    read = 0

    def __init__(self, path: Path, framework: str) -> None:
        self.file = ORIGINAL(path, framework)

    def __enter__(self) -> Counted:
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> Any:
        return self.file.keys()

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self.file.get_slice(name))


class CountedSlice:
    def __init__(self, slices: Any) -> None:
        self.slices, self.get_shape, self.get_dtype = slices, slices.get_shape, slices.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.slices[index]
        Counted.read += found.nbytes
        return found


ORIGINAL = files.safe_open


NUMBERS = itertools.count()


def mesh(*shape: int) -> DeviceMesh:
    """Each with names of its own: DTensor keeps meshes in its caches, also those whose groups ended with their test."""
    number = next(NUMBERS)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"{name}{number}" for name in "ab"[: len(shape)]))


def empty(config: Config, split: Any) -> nn.Module:
    """A model on the meta device, split there, and then given memory that holds nothing sensible."""
    with torch.device("meta"):
        model = models.build(config)
    model = split(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def distribute(model: nn.Module, over: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Module:
    """Every parameter as a DTensor; one that has only one dimension is never split along a second."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fitting = [
                Shard(0) if isinstance(place, Shard) and place.dim >= parameter.dim() else place for place in placements
            ]
            if id(parameter) not in made:
                whole = torch.empty(parameter.shape)
                made[id(parameter)] = nn.Parameter(distribute_tensor(whole, over, fitting))
            setattr(module, name, made[id(parameter)])
    return model


def expect(model: nn.Module, config: Config) -> None:
    """What a single process has, on every rank."""
    reference = dict(models.build(config).named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == reference.keys()
    for name, parameter in found.items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole, reference[name]), name


def fill_and_count(
    kind: str, folder: str, shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[int, int]:
    """Bytes read, and bytes held."""
    model = empty(CONFIGS[kind], lambda model: distribute(model, mesh(*shape), placements))
    files.safe_open, Counted.read = Counted, 0
    try:
        hub.load_into(model, folder)
    finally:
        files.safe_open = ORIGINAL
    expect(model, CONFIGS[kind])
    return Counted.read, sum(parameter.to_local().nbytes for parameter in model.parameters())


@pytest.fixture(params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> str:
    hub.save(models.build(CONFIGS[kind]), tmp_path / "model", max_shard_bytes=10_000)
    return str(tmp_path / "model")


@pytest.mark.parametrize("placements", SHARDED, ids=str)
def test_each_of_two_ranks_reads_what_it_holds(ranks, kind, folder, placements):
    whole = sum(parameter.nbytes for parameter in models.build(CONFIGS[kind]).parameters())
    for read, held in ranks(2, fill_and_count, kind, folder, (2,), placements):
        assert read == held
        assert held == whole if placements == (Replicate(),) else held < 0.6 * whole


@pytest.mark.parametrize("placements", ON_TWO_AXES, ids=str)
def test_meshes_of_two_axes(ranks, kind, folder, placements):
    for read, held in ranks(4, fill_and_count, kind, folder, (2, 2), placements):
        assert read == held


def column_split(model: nn.Module, over: DeviceMesh) -> nn.Module:
    """As tensor parallelism leaves a model: rows of some, columns of others, the rest whole and plain."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            place = Shard(0) if name.endswith(("qkv", "up", "gate")) else Shard(1)
            module.weight = nn.Parameter(distribute_tensor(torch.empty(module.weight.shape), over, [place]))
    return model


def both(model: nn.Module) -> nn.Module:
    over = mesh(2, 2)
    data, tensor = (over[name] for name in over.mesh_dim_names)
    column_split(model, tensor)
    for block in model.blocks:
        fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data)


def sharded(model: nn.Module) -> nn.Module:
    over = mesh(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=over)
    return fully_shard(model, mesh=over)


def fill_and_save(kind: str, folder: str, split: Any, target: str) -> None:
    model = empty(CONFIGS[kind], split)
    hub.load_into(model, folder)
    expect(model, CONFIGS[kind])
    hub.save(model, target, max_shard_bytes=10_000)
    loaded = hub.load(target)  # all ranks may read at once: whoever wrote has ended
    expect(loaded, CONFIGS[kind])


@pytest.mark.parametrize(
    ("size", "split"), [(2, sharded), (3, sharded), (4, both)], ids=["2 ranks", "3 ranks", "2 × 2"]
)
def test_what_fsdp_shards_is_filled_and_saved(ranks, kind, folder, size, split, tmp_path):
    """With tensor parallelism below it, too: a rank's rows are then a part of a part."""
    ranks(size, fill_and_save, kind, folder, split, str(tmp_path / "again"))


def save_whole(kind: str, target: str) -> None:
    hub.save(models.build(CONFIGS[kind]), target)


def test_all_ranks_may_save_a_whole_model(ranks, kind, tmp_path):
    ranks(4, save_whole, kind, str(tmp_path / "saved"))
    for (name, saved), (_, expected) in zip(
        hub.load(tmp_path / "saved").named_parameters(), models.build(CONFIGS[kind]).named_parameters(), strict=True
    ):
        assert saved.equal(expected), name


def initialize(kind: str, split: Any) -> None:
    model = empty(CONFIGS[kind], split)
    model.initialize(seed=0)
    expect(model, CONFIGS[kind])


@pytest.mark.parametrize(
    ("size", "split"), [(2, sharded), (3, sharded), (4, both)], ids=["2 ranks", "3 ranks", "2 × 2"]
)
def test_first_values_are_those_of_a_single_process(ranks, kind, size, split):
    ranks(size, initialize, kind, split)
