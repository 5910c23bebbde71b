"""A folder of safetensors as Hugging Face lays it out: one file, or several and an index. Nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", SINGLE + ".index.json", "pytorch_model.bin.index.json")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: give the folder of a Hugging Face checkpoint, downloaded")
    settings: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return settings


class Reader:
    """Reads slices of a folder's tensors; opens each file when something in it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self.where = self._find()  # the file of each tensor

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def slices(self, name: str) -> Any:
        """A tensor, of which only what is asked for by `[…]` is read."""
        return self._file(self.where[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slices(name).get_shape())

    def dtype(self) -> torch.dtype:
        """That of the first of its tensors that holds fractions."""
        kinds = (self.slices(name).get_dtype() for name in self.where)
        found = next((kind for kind in kinds if not kind.startswith(("I", "U", "BOOL"))), "F32")
        if found not in _DTYPES:
            raise ValueError(f"its tensors are of dtype {found}: only {', '.join(_DTYPES)} can be loaded")
        return _DTYPES[found]

    def _find(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            where: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            lost = sorted({file for file in where.values() if not (self.folder / file).is_file()})
            if lost:
                raise ValueError(f"its {INDEX} names {', '.join(lost)}, which are not there: download them again")
            return where
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        pickled = sorted(path.name for path in self.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise ValueError(
                f"it holds weights only as pickles ({', '.join(pickled)}), which could run any code and are never "
                f"opened: take the safetensors of the model, or convert it with transformers' save_pretrained"
            )
        raise ValueError(f"it has neither {SINGLE} nor {INDEX}: download the model's safetensors into it")

    def _file(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = self._open.enter_context(safe_open(self.folder / name, "pt"))
            except SafetensorError as error:
                raise ValueError(f"its file {name} cannot be read ({error}): download it again") from error
        return self._files[name]


class Writer:
    """Writes tensors to files of at most so many bytes (or of one tensor), in the order in which they come."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._written: list[list[str]] = []  # the names in each file
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._waiting and sum(each.nbytes for each in self._waiting.values()) + tensor.nbytes > self._max_bytes:
            self._flush()
        self._waiting[name] = tensor
        self._bytes += tensor.nbytes

    def finish(self, settings: dict[str, Any]) -> None:
        self._flush()
        (self._folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        if len(self._written) == 1:
            self._part(0).rename(self._folder / SINGLE)
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05}-of-{len(self._written):05}.safetensors"
            self._part(number).rename(self._folder / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": where}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        save_file(self._waiting, self._part(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._waiting))
        self._waiting = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def refuse_what_is_no_checkpoint(folder: Path) -> None:
    """Before anything is written: a folder is replaced only if it is empty or holds what was saved so before."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / CONFIG).is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} is there and is not a checkpoint, so it is not overwritten: choose another folder")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder beside, which takes this one's name when it is whole; files that are not weights move along."""
    folder = folder.absolute()
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{state}") for state in ("new", "old"))
    new.mkdir(parents=True)
    try:
        yield new
        if folder.exists():
            for path in folder.iterdir():
                if path.is_file() and not path.name.endswith(_WEIGHTS) and not (new / path.name).exists():
                    shutil.copy2(path, new)
            folder.rename(old)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
