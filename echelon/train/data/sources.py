"""The sources of a run: what its config names, opened by every rank.

Text is tokenised once, by `echelon train` or else by rank 0, into files of tokens in the run's cache; while what it was
made from stays the same, these are used again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from echelon.models.bert import BertConfig
from echelon.models.presets import segments
from echelon.train.config import Config
from echelon.train.data import files, images, large
from echelon.train.data.documents import Documents, of_dataset, of_files, progress
from echelon.train.data.errors import DataError
from echelon.train.data.prepare import fitting_dtype, prepare, useful_workers
from echelon.train.data.sequences import Masked, NextToken, Windows
from echelon.train.data.source import Source, Sources
from echelon.train.data.synthetic import SyntheticImages, SyntheticMasks, SyntheticWindows
from echelon.train.data.token_file import Description, FileWindows, describe, open_tokens, split
from echelon.train.data.tokenizer import open_tokenizer


def open_sources(config: Config, cache: Path) -> Sources:
    """What to train on and what is held out. Called by every rank; `cache` is a folder that all of them see."""
    kind = config.data.kind
    if kind == "synthetic":
        return _synthetic(config)
    held_out = Path(config.data.held_out_path) if config.data.held_out_path else None
    if kind == "tokens":
        return _tokens(config, Path(config.data.path), held_out)
    if kind == "images":
        return _images(config, Path(config.data.path), held_out)
    if kind == "large-images":
        return _large_images(config, Path(config.data.path), held_out)
    by_first_rank(lambda: tokenise(config, cache))
    named = config.data.held_out_path or config.data.held_out_split
    return _tokens(config, cache / "train.bin", cache / "held-out.bin" if named else None)


def tokenise(config: Config, cache: Path) -> None:
    """Make the files of tokens that a run needs and that are not in its cache yet."""
    cache.mkdir(parents=True, exist_ok=True)
    _tokenise(config, _documents(config), cache / "train.bin")
    if (held_out := _held_out_documents(config)) is not None:
        _tokenise(config, held_out, cache / "held-out.bin")


def by_first_rank(work: Callable[[], None]) -> None:
    """Let rank 0 do it while the others wait; what it fails with, all fail with."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        work()
        return
    wrong: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as error:
            wrong = [str(error) or repr(error)]
    dist.broadcast_object_list(wrong, src=0)
    if wrong[0] is not None:
        raise DataError(wrong[0])


def _tokenise(config: Config, documents: Documents, out: Path) -> None:
    tokenizer = open_tokenizer(config.data.tokenizer)
    _check_vocabulary(config, f"the tokenizer {config.data.tokenizer}", tokenizer.vocabulary)
    inputs = documents.fingerprint(tokenizer)
    if _is_made_from(out, inputs):
        return
    workers = useful_workers(documents.bytes, tokenizer)
    with progress(documents) as done:
        pieces, dtype = documents.pieces(), fitting_dtype(tokenizer)
        prepare(pieces, tokenizer, out, dtype=dtype, workers=workers, inputs=inputs, done=done)


def _documents(config: Config) -> Documents:
    data = config.data
    return of_dataset(data.path, data.split, data.column) if data.kind == "datasets" else of_files([data.path])


def _held_out_documents(config: Config) -> Documents | None:
    """What is named for evaluation; None if a part of the rest is to be held out."""
    data = config.data
    if data.kind == "datasets" and (data.held_out_path or data.held_out_split):
        return of_dataset(data.held_out_path or data.path, data.held_out_split or data.split, data.column)
    if not data.held_out_path:
        return None
    trained_on, held_out = set(files.find([data.path])), files.find([data.held_out_path])
    if both := [path for path in held_out if path in trained_on]:
        raise DataError(f"{both[0]} would be trained on and held out at once: name other files for one of them")
    return of_files([data.held_out_path])


def _is_made_from(out: Path, inputs: str) -> bool:
    described = describe(out)
    return described is not None and described.inputs == inputs and out.exists()


def _tokens(config: Config, path: Path, held_out_path: Path | None) -> Sources:
    tokens, described = _open(config, path)
    length = config.length
    if held_out_path is None:
        train, held_out = split(tokens, length, config.data.held_out)
        kept = held_out is not None
    else:
        train, held_out, kept = FileWindows(tokens, length), _open_held_out(config, held_out_path), False
    if len(train) < 1:
        least = 2 * length + 2 if kept else length + 1
        what = f"one sample of {length} to train on{' and one that is held out' if kept else ''}"
        raise DataError(
            f"{config.data.path} has {len(tokens)} tokens, but {what} need {least}: "
            f"use more data, or a smaller [data] length"
        )
    return Sources(_sequences(config, train, described), _sequences(config, held_out, described) if held_out else None)


def _open(config: Config, path: Path) -> tuple[Any, Description | None]:
    tokens, described = open_tokens(path, config.data.dtype)
    if described:
        _check_vocabulary(config, str(path), described.vocabulary)
    return tokens, described


def _open_held_out(config: Config, path: Path) -> FileWindows:
    tokens, _ = _open(config, path)
    windows = FileWindows(tokens, config.length)
    if len(windows) < 1:
        raise DataError(
            f"{config.data.held_out_path} has {len(tokens)} tokens, but one sample of {config.length} needs "
            f"{config.length + 1}"
        )
    return windows


def _check_vocabulary(config: Config, what: str, vocabulary: int) -> None:
    of_model = _vocabulary(config)
    if vocabulary > of_model:
        raise DataError(
            f"{what} has a vocabulary of {vocabulary}, but {config.name} one of {of_model}: "
            f"set [model] vocabulary = {vocabulary}, or use the model's tokenizer"
        )


def _vocabulary(config: Config) -> int:
    architecture: Any = config.architecture
    return int(architecture.vocabulary)


def _sequences(config: Config, windows: Windows, described: Description | None) -> Source:
    vocabulary = _vocabulary(config)
    if not isinstance(config.architecture, BertConfig):
        return NextToken(windows, vocabulary)
    return Masked(windows, vocabulary, _mask(config, described), config.data.masked, config.train.seed)


def _mask(config: Config, described: Description | None) -> int:
    """The tokenizer's own token for what is hidden, or else the first that it leaves free; of tokens of which nothing
    is known, the model's last.
    """
    vocabulary = _vocabulary(config)
    if described is None:
        return vocabulary - 1
    if described.mask is not None:
        return described.mask
    if described.vocabulary < vocabulary:
        return described.vocabulary
    raise DataError(
        f"{config.name} learns from masked tokens, but the tokenizer has no token for the mask, and the "
        f"model's vocabulary of {vocabulary} has none to spare: set [model] vocabulary = {vocabulary + 1}"
    )


def _synthetic(config: Config) -> Sources:
    count = config.data.samples

    def make(first: int, count: int) -> Source:
        architecture: Any = config.architecture
        if segments(architecture):
            return SyntheticMasks(first, count, architecture.classes, architecture.channels, config.image)
        if hasattr(architecture, "classes"):
            return SyntheticImages(first, count, architecture.classes, architecture.channels, config.image)
        return _sequences(config, SyntheticWindows(first, count, config.length, architecture.vocabulary), None)

    kept = max(1, round(count * config.data.held_out)) if config.data.held_out > 0 else 0
    return Sources(make(0, count), make(count, kept) if kept else None)


def _images(config: Config, folder: Path, held_out_folder: Path | None) -> Sources:
    architecture: Any = config.architecture
    side, channels, seed = config.image, architecture.channels, config.train.seed
    images.pillow()
    images.check_channels(channels)
    classes = images.find_classes(folder, architecture.classes)
    train = images.find_images(folder, classes)
    if held_out_folder is None:
        train, held_out = _split(config, train, folder)
    else:
        _check_classes(config, held_out_folder, classes)
        held_out = images.find_images(held_out_folder, classes)
    return Sources(
        images.ImageFolder(train, side, channels, seed),
        images.ImageFolder(held_out, side, channels, None) if held_out else None,
    )


def _split(config: Config, found: list[images.Image], folder: Path) -> tuple[list[images.Image], list[images.Image]]:
    train, held_out = images.split(found, folder, config.data.held_out)
    if config.data.held_out > 0 and not (train and held_out):
        raise DataError(
            f"{folder} has {len(found)} images, too few to hold {config.data.held_out:g} of them "
            "out: use more, set [data] held_out, or name a held_out_path"
        )
    return train, held_out


def _check_classes(config: Config, held_out_folder: Path, classes: dict[str, int]) -> None:
    architecture: Any = config.architecture
    if others := images.find_classes(held_out_folder, architecture.classes).keys() - classes.keys():
        raise DataError(f"{held_out_folder} has classes that {config.data.path} has not: {', '.join(sorted(others))}")


def _large_images(config: Config, folder: Path, held_out_folder: Path | None) -> Sources:
    architecture: Any = config.architecture
    images.check_channels(architecture.channels)
    classes = None if segments(architecture) else images.find_classes(folder, architecture.classes)
    train, masks = _found(folder, classes)
    if held_out_folder is None:
        train, held_out = _split(config, train, folder)
    else:
        if classes is not None:
            _check_classes(config, held_out_folder, classes)
        held_out, more = _found(held_out_folder, classes)
        masks |= more

    def made(found: list[images.Image], seed: int | None) -> Source:
        of = masks if classes is None else None
        return large.LargeImages(found, config.image, architecture.channels, seed, of, architecture.classes)

    return Sources(made(train, config.train.seed), made(held_out, None) if held_out else None)


def _found(folder: Path, classes: dict[str, int] | None) -> tuple[list[images.Image], dict[Path, Path]]:
    """The large images of a folder, of classes or with masks."""
    if classes is not None:
        return large.find_large_images(folder, classes), {}
    masks = large.find_masks(folder)
    return [images.Image(path, 0) for path in masks], masks
