"""A run's model as a Hugging Face folder, made by one process without ranks, whatever layout trained it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from echelon.models import held, hub
from echelon.models.presets import build
from echelon.parallel.apply import DTYPES
from echelon.train import checkpoint_folder as folders
from echelon.train.boxes import Box
from echelon.train.checkpoint_folder import CheckpointError
from echelon.train.config import load
from echelon.train.planner import ReadBoxes


def export(run: Path, out: Path, step: int | None = None) -> int:
    """Write the model of a run's newest checkpoint, or that of a step, and return the step."""
    config = load(run / "config.toml")
    with torch.device("meta"):
        model = build(config.architecture)
    model.to(DTYPES[config.strategies.precision]).to_empty(device="cpu")
    found = fill(model, run / "checkpoints", step)
    hub.save(model, out)
    return found


def fill(model: nn.Module, folder: Path, step: int | None = None) -> int:
    """Read a checkpoint's parameters and buffers into a plain model."""
    found = folders.read(folder, step)
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint yet")
    path, description, metadata = found
    tensors = {f"model.{name}": tensor for name, tensor in held.tensors(model)}
    folders.check_tensors(path, metadata, {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()})
    wanted = {name: [(Box((0,) * x.dim(), tuple(x.shape)), x.detach())] for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what is wanted
        dcp.load({}, storage_reader=dcp.FileSystemReader(path), planner=ReadBoxes(wanted), no_dist=True)
    step_found: int = description["step"]
    return step_found
