"""What settings must be together: found before any rank is started, by an error that says what would do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.models import presets
from echelon.models.model import Model
from echelon.models.presets import is_causal, segments, takes_images
from echelon.parallel import apply, sequence
from echelon.parallel.layout import Layout
from echelon.parallel.pipeline.schedule import make
from echelon.train.config import Config, ConfigError

_AT_LEAST = {
    "train": {"steps": 1, "batch": 1, "micro_batch": 0, "clip": 0, "log_every": 1, "eval_every": 0, "sample": 0}
    | {"eval_samples": 0, "seed": 0, "timeout": 1},
    "data": {"length": 0, "image": 0, "samples": 1},
    "optimizer": {"lr": 0, "eps": 0, "weight_decay": 0, "momentum": 0},
    "schedule": {"warmup": 0},
    "checkpoint": {"every": 0, "keep": 1},
    "record": {"first": 0, "steps": 0},
}
_MICROBATCHES = 4  # for each stage of a pipeline, where nothing is said: then less than a fifth of it is bubble
_LIMIT = 2**63  # of whole numbers
_SHARES = {"data": ("held_out", "masked"), "schedule": ("decay", "floor")}


def check(config: Config, ranks: int) -> Config:
    """The config for so many ranks, its layout without -1; raises ConfigError if it cannot be trained so."""
    _check_numbers(config)
    try:
        layout = config.layout.resolve(ranks)
        _check_batch(config, layout)
        model = meta_model(config)
        apply.check(model, layout, config.strategies, example(config, layout))
        if layout.cp > 1:
            _check_sequences(config, layout)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_samples(config, layout)
    if layout.depth > 1:
        _check_pipeline(config, layout)
    _check_data(config)
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('[train] device = "cuda", but PyTorch finds no GPU here: use "auto" or "cpu"')
    return replace(config, layout=layout)


def meta_model(config: Config) -> Model:
    """The plain model without memory: for shapes, counts and plans."""
    with torch.device("meta"):
        return presets.build(config.architecture)


def check_files(config: Config) -> None:
    """That the data is there; a plan can do without."""
    for name, path in _files(config):
        if not Path(path).exists():
            raise ConfigError(f"[data] {name} = {path!r}: there is no such file or folder")


def attended(config: Config) -> int:
    """What a sample is for attention: its tokens, or an image's patches and the token for its class; else 1."""
    shape: Any = config.architecture
    return config.length or (1 + (shape.image // shape.patch) ** 2 if hasattr(shape, "patch") else 1)


def micro_batch(config: Config) -> int:
    """Samples in one pass of one rank."""
    return config.train.batch // config.layout.dp // passes(config)


def passes(config: Config) -> int:
    """Passes of one rank in a step; in a pipeline, microbatches. Where nothing is said, a pipeline has the least number
    that is four a stage, as far as a step's samples can be divided so.
    """
    own, layout = config.train.batch // config.layout.dp, config.layout
    if config.train.micro_batch or layout.depth == 1:
        return own // (config.train.micro_batch or own)
    kind, chunks = config.strategies.schedule, config.strategies.chunks
    fitting = [
        count for count in range(1, own + 1) if own % count == 0 and _is_schedule(kind, layout.depth, count, chunks)
    ]
    return next((count for count in fitting if count >= _MICROBATCHES * layout.depth), max(fitting, default=own))


def example(config: Config, layout: Layout) -> dict[str, Tensor]:
    """The arguments of the model for one pass of one rank, without memory."""
    samples, whole = micro_batch(replace(config, layout=layout)), torch.zeros((), device="meta", dtype=torch.int64)
    given = {"samples_B": whole.expand(samples)}
    if takes_images(config.architecture):
        shape: Any = config.architecture
        images = {"images_BCHW": torch.empty(samples, shape.channels, config.image, config.image, device="meta")}
        if segments(shape):
            return given | images | {"targets_BHW": whole.expand(samples, config.image, config.image)}
        return given | images | {"targets_B": whole.expand(samples)}
    tokens = whole.expand(samples, config.length // layout.cp)
    positions = {"positions_S": whole.expand(tokens.shape[1])} if layout.cp > 1 else {}
    return given | {"tokens_BS": tokens, "targets_BS": tokens} | positions


def _check_numbers(config: Config) -> None:
    for section, least in _AT_LEAST.items():
        for name, bound in least.items():
            value = getattr(getattr(config, section), name)
            if not bound <= value < (_LIMIT if isinstance(value, int) else math.inf):
                raise ConfigError(f"[{section}] {name} = {value}: it is a number, {bound} or more")
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ConfigError(f"[optimizer] betas = {list(config.optimizer.betas)}: each is 0 or more, and below 1")
    for section, names in _SHARES.items():
        for name in names:
            if not 0 <= (value := getattr(getattr(config, section), name)) <= 1:
                raise ConfigError(f"[{section}] {name} = {value} is a share, from 0 to 1")


def _check_batch(config: Config, layout: Layout) -> None:
    batch, micro = config.train.batch, config.train.micro_batch
    if batch % layout.dp:
        raise ConfigError(
            f"[train] batch = {batch} cannot be dealt to dp = {layout.dp} ranks: {_nearest(batch, layout.dp)}"
        )
    own = batch // layout.dp
    if micro and own % micro:
        fitting = [each for each in range(1, own + 1) if own % each == 0]
        best = min(fitting, key=lambda each: abs(math.log(each / micro)))
        raise ConfigError(
            f"[train] micro_batch = {micro} does not divide the {own} samples that a rank has in a step (batch = "
            f"{batch}, dp = {layout.dp}): the nearest that does is {best}"
        )


def _check_samples(config: Config, layout: Layout) -> None:
    if hasattr(config.architecture, "image") and config.image != (side := config.architecture.image):
        raise ConfigError(f"[data] image = {config.image}, but the model takes images of {side}: set [model] image too")
    if hasattr(config.architecture, "context") and config.length > config.architecture.context:
        context = config.architecture.context
        raise ConfigError(f"[data] length = {config.length} is beyond the model's context: use {context} or less")
    if not takes_images(config.architecture) and layout.tp > 1 and config.length // layout.cp % layout.tp:
        step = layout.tp * layout.cp
        raise ConfigError(
            f"[data] length = {config.length} cannot be split over tp = {layout.tp}"
            f"{f' × cp = {layout.cp}' if layout.cp > 1 else ''}: {_nearest(config.length, step)}"
        )


def _check_pipeline(config: Config, layout: Layout) -> None:
    """That the schedule can take as many microbatches as there are, and the updates that are asked for."""
    strategies, config = config.strategies, replace(config, layout=layout)
    own, count = config.train.batch // layout.dp, passes(config)
    try:
        schedule = make(strategies.schedule, layout.depth, count, chunks=strategies.chunks)
    except ValueError as error:
        raise ConfigError(
            f"{error} (a step's {own} samples for each rank of dp, [train] batch = {config.train.batch} over dp = "
            f"{layout.dp}, are {count} microbatches of [train] micro_batch = {micro_batch(config)})"
        ) from None
    if schedule.is_versioned and config.train.clip:
        raise ConfigError(
            f"[train] clip = {config.train.clip}: {strategies.schedule} updates each stage by itself, and never knows "
            "the norm of all gradients: use clip = 0, or a synchronous schedule"
        )


@cache
def _is_schedule(kind: str, ranks: int, microbatches: int, chunks: int) -> bool:
    try:
        make(kind, ranks, microbatches, chunks=chunks)
    except ValueError:
        return False
    return True


def _check_sequences(config: Config, layout: Layout) -> None:
    kind, architecture = config.strategies.sequence, config.architecture
    sequence.positions(kind, is_causal(architecture), config.length, layout.cp, 0, torch.device("meta"))
    heads = getattr(architecture, "heads", layout.cp) // layout.tp
    if kind == "ulysses" and heads % layout.cp:
        raise ConfigError(
            f'[strategies] sequence = "ulysses" deals {heads} heads (those of a rank of tp) to cp = {layout.cp}, which '
            'does not divide them: choose a cp that does, or sequence = "ring"'
        )


def _check_data(config: Config) -> None:
    data, images = config.data, takes_images(config.architecture)
    kinds = ["images", "large-images", "synthetic"] if images else ["text", "tokens", "datasets", "synthetic"]
    if segments(config.architecture):
        kinds.remove("images")
    if data.kind not in kinds:
        raise ConfigError(
            f'[data] kind = "{data.kind}" is not for {type(config.architecture).__name__.removesuffix("Config")}, '
            f"which takes {'images' if images else 'tokens'}: choose {' or '.join(kinds)}"
        )
    if data.kind != "synthetic" and not data.path:
        raise ConfigError(f'[data] kind = "{data.kind}" needs a path')
    if data.held_out_split and data.kind != "datasets":
        raise ConfigError(f'[data] held_out_split is for kind = "datasets", and not for "{data.kind}"')
    held_out = (data.held_out_path or data.path, data.held_out_split or data.split)
    if (data.held_out_path or data.held_out_split) and held_out == (data.path, data.split):
        raise ConfigError(f"[data] {data.path!r} cannot be trained on and held out at once: leave held_out_path out")


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """The settings that must be paths; a text's may be a pattern, and a dataset's a name."""
    for name in ("path", "held_out_path"):
        path = getattr(config.data, name)
        if path and config.data.kind in ("tokens", "images", "large-images"):
            yield name, path


def _nearest(value: int, step: int) -> str:
    low, high = value // step * step, -(-value // step) * step
    return f"the nearest that can are {low} and {high}" if low else f"the least that can is {high}"
