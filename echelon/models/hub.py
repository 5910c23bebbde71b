"""Hugging Face's checkpoints in and out, for training and serving alike.

`load` makes a model from a folder. `load_into` fills a model that may be split over ranks already: each rank reads from
the files only the slices that it holds. `save` writes a folder that `transformers` loads.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.models import families, files, held
from echelon.models.model import Model
from echelon.models.presets import MODELS, Config, change
from echelon.models.translate import Family, Source

Shape = tuple[int, ...]


def load(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, **overrides: Any
) -> Model:
    """The model of a folder, in the dtype that it was saved in or the one given; `overrides` change its config."""
    folder = Path(folder)
    built = change(config_of(folder), overrides)
    dtype = dtype or stored_dtype(folder)
    with torch.device("meta"):
        model = MODELS[type(built)](built)
    model.to(dtype).to_empty(device=device)
    load_into(model, folder)
    return model


def config_of(folder: str | Path) -> Config:
    """The config of the model that a folder holds."""
    with _about(Path(folder)):
        settings = files.read_config(Path(folder))
        found: Config = families.find(settings).read(settings)
        return found


def stored_dtype(folder: str | Path) -> torch.dtype:
    """The dtype that the weights of a folder are in."""
    with _about(Path(folder)), files.Reader(Path(folder)) as reader:
        return reader.dtype()


@torch.no_grad()
def load_into(model: nn.Module, folder: str | Path) -> None:
    """Fill a model, the whole or some of its blocks, whose parameters are plain tensors or DTensors."""
    folder, config = Path(folder), _config(model)
    with _about(folder):
        family = families.find(files.read_config(folder))
        if family.config is not type(config):
            raise ValueError(f"it holds a {family.architecture}, which cannot be loaded into a {type(model).__name__}")
        with files.Reader(folder) as reader:
            expected = _expected(family, config)
            stored = _stored_names(reader, family, expected)
            needed = [family.source(name, config) for name, _ in held.tensors(model)]
            unexpected = [name for name in stored if name not in expected and not family.unneeded(name, config)]
            _check(reader, stored, {rows.tensor for source in needed for rows in source.rows}, expected, unexpected)
            for source, (_, tensor) in zip(needed, held.tensors(model), strict=True):
                _read(reader, stored, source, held.part(tensor), held.local(tensor))


@torch.no_grad()
def save(model: nn.Module, folder: str | Path, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write a folder that `transformers` loads: made beside, and renamed when it is whole.

    A checkpoint that was there is replaced; files such as a tokenizer's stay. In a job of several ranks rank 0 writes:
    all may call this, and all must if the model holds DTensors.
    """
    folder, config = Path(folder), _config(model)
    files.refuse_what_is_no_checkpoint(folder)
    kind = families.model_type(config)
    family = families.FAMILIES[kind]
    split = any(isinstance(tensor, DTensor) for _, tensor in held.tensors(model))
    writes = not dist.is_initialized() or dist.get_rank() == 0
    with files.replacing(folder) if writes else contextlib.nullcontext() as new:
        writer = None if new is None else files.Writer(new, max_shard_bytes)
        for name, tensor in held.tensors(model):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            if writer is not None:
                for theirs, value in _parted(family.source(name, config), whole):
                    writer.add(theirs, value.cpu())
        if writer is not None:
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            writer.finish(family.write(config) | {"model_type": kind, "torch_dtype": dtype})
    if split:
        dist.barrier()


def _config(model: nn.Module) -> Any:
    if not hasattr(model, "config") or type(model.config) not in MODELS:
        raise ValueError(
            f"{type(model).__name__} is not one of the models of echelon.models, which alone can be loaded"
        )
    return model.config


@contextlib.contextmanager
def _about(folder: Path) -> Iterator[None]:
    """Errors that say of which folder they speak."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error


def _expected(family: Family, config: Any) -> dict[str, Shape]:
    """The shapes of all tensors that a whole checkpoint of this config has."""
    with torch.device("meta"):
        whole = MODELS[type(config)](config)
    shapes: dict[str, Shape] = {}
    for name, tensor in held.tensors(whole):
        for theirs, value in _parted(family.source(name, config), tensor.detach()):
            shapes[theirs] = tuple(value.shape)
    return shapes


def _stored_names(reader: files.Reader, family: Family, expected: dict[str, Shape]) -> dict[str, str]:
    """The names in the files, by the names that they should have: old ones differ in a prefix and in those of norms."""
    stored = {}
    for name in reader.where:
        modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        stored[family.prefix + modern if family.prefix + modern in expected else modern] = name
    return stored


def _check(
    reader: files.Reader, stored: dict[str, str], wanted: set[str], expected: dict[str, Shape], unexpected: list[str]
) -> None:
    """Before anything is read: that all is there, in the right shapes, and nothing that would silently be left out."""
    missing = sorted(wanted - stored.keys())
    if missing:
        raise ValueError(f"it lacks {_some(missing)}: is it whole, and does {files.CONFIG} belong to these weights?")
    if unexpected:
        raise ValueError(
            f"it holds {_some(sorted(unexpected))}, for which the model has no place: does {files.CONFIG} belong to "
            f"these weights, and was the model built from it?"
        )
    wrong = [
        f"{name} {reader.shape(stored[name])} instead of {expected[name]}"
        for name in sorted(wanted)
        if reader.shape(stored[name]) != expected[name]
    ]
    if wrong:
        raise ValueError(f"it has other shapes than the model: {_some(wrong)}; build the model from its {files.CONFIG}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _read(reader: files.Reader, stored: dict[str, str], source: Source, part: held.Part, out: Tensor) -> None:
    """This rank's part of a tensor, from the slices of theirs that it consists of."""
    if not part:
        out.copy_(reader.slices(stored[source.rows[0].tensor])[()])
        return
    mine, *others = part
    offset = 0
    for rows in source.rows:
        end = mine.stop if rows.count is None else offset + rows.count
        first, last = max(mine.start, offset), min(mine.stop, end)
        if first < last:
            theirs = slice(rows.start + first - offset, rows.start + last - offset)
            values = reader.slices(stored[rows.tensor])[(*others, theirs) if source.transposed else (theirs, *others)]
            out[first - mine.start : last - mine.start].copy_(values.T if source.transposed else values)
        offset = end


def _parted(source: Source, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Their tensors, from one of ours."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    offset = 0
    for rows in source.rows:
        piece = whole if rows.count is None else whole[offset : offset + rows.count]
        pieces.setdefault(rows.tensor, []).append((rows.start, piece))
        offset += rows.count or 0
    for name, found in pieces.items():
        ordered = [piece for _, piece in sorted(found, key=lambda start_and_piece: start_and_piece[0])]
        joined = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
        yield name, (joined.T if source.transposed else joined).contiguous()
