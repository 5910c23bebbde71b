"""From a config to what is trained: ranks, device, and the model on this rank of the grid with its first values."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.comm.group import EchelonGroup
from echelon.launch.identity import identity
from echelon.models import hub
from echelon.parallel import fp8
from echelon.parallel.apply import DTYPES, cut, parallelize
from echelon.parallel.layout import Grid
from echelon.train.checks import example, meta_model
from echelon.train.config import Config, ConfigError


def join_world() -> None:
    """The process group, if the script has not made it: of all ranks, or of a process that was started alone."""
    if dist.is_initialized():
        return
    if identity().launcher == "none":
        dist.init_process_group("echelon", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("echelon")


def limit_waiting(grid: Grid, seconds: float) -> None:
    """How long ranks wait for others in the groups of training (and not in those of checkpoints, which a slow disk may
    take longer): then the watchdog ends the job, and says who has not come.
    """
    groups = [dist.group.WORLD, *(mesh.get_group() for mesh in grid.meshes.values() if mesh.ndim == 1)]
    for group in groups:
        if isinstance(group, EchelonGroup):
            group.set_timeout(timedelta(seconds=seconds))


def choose_device(config: Config) -> torch.device:
    wanted = config.train.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if config.strategies.fp8:
        try:
            fp8.check_device(device)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return device


def build_model(config: Config, grid: Grid, device: torch.device) -> nn.Module:
    """What a pipeline cuts off never gets memory, and what stage 3 shards gets it after it was sharded: no rank ever
    holds the whole.
    """
    model: nn.Module = cut(meta_model(config), grid, config.strategies, example(config, grid.layout))
    if config.strategies.stage == 3:
        model = parallelize(model, grid, config.strategies).to_empty(device=device)
        _fill(model, config)
        return model
    model = model.to(DTYPES[config.strategies.precision]).to_empty(device=device)
    _fill(model, config)
    return parallelize(model, grid, config.strategies)


def in_dtype(given: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """A model's arguments with images in the precision that it computes in."""
    dtype = DTYPES[config.strategies.precision]
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in given.items()}


def _fill(model: Any, config: Config) -> None:
    if "init" in config.model:
        hub.load_into(model, config.model["init"])
    else:
        model.initialize(config.train.seed)
    model.place.seed = config.train.seed
