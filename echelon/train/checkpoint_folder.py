"""A run's folder of checkpoints: what is in it, what is whole, and how one comes into it all at once.

`step-00000100` holds DCP's files and `state.json`. It is written as `step-00000100.saving`, brought to the disk, looked
over, and only then renamed: whatever has the name is whole. Where it takes another's place, that one waits as
`step-00000100.old` until it has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata

from echelon.comm.torch_compat import lengths_of_files

FORMAT = "echelon checkpoint 1"
DESCRIPTION = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def steps(folder: Path) -> list[int]:
    """Of all that is named as a checkpoint, ascending."""
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*")]
    return sorted(int(match[1]) for match in found if match)


def complete(folder: Path) -> list[int]:
    """The steps that were saved, ascending."""
    return [step for step in steps(folder) if _description(path_of(folder, step))]


def clean(folder: Path) -> None:
    """Make the folder, and remove what a save that was killed has left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("step-*.old"):
            if not old.with_suffix("").exists():
                old.rename(old.with_suffix(""))
        for left in [path for kind in ("saving", "old", "removed") for path in folder.glob(f"step-*.{kind}")]:
            shutil.rmtree(left)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot hold checkpoints: {error.strerror} ({error.filename})") from error


def describe(**what: Any) -> str:
    """What `state.json` says of a checkpoint."""
    return json.dumps({"format": FORMAT, **what}, indent=2)


def commit(saving: Path, description: str) -> None:
    """Give what is written its name."""
    folder, final = saving.parent, saving.with_suffix("")
    with open(saving / DESCRIPTION, "w") as file:
        file.write(description)
        file.flush()
        os.fsync(file.fileno())
    _check_files(saving, FileSystemReader(saving).read_metadata())
    _sync(saving)
    old = final.with_suffix(".old")
    if final.exists():
        final.rename(old)
    saving.rename(final)
    _sync(folder)
    shutil.rmtree(old, ignore_errors=True)


def prune(folder: Path, keep: int, saved: int) -> None:
    """Remove all checkpoints but the one just saved and the newest others, `keep` together."""
    others = [step for step in complete(folder) if step != saved]
    for step in others[: max(len(others) - keep + 1, 0)]:
        old = path_of(folder, step)
        try:
            shutil.rmtree(old.rename(old.with_suffix(".removed")))
        except OSError as error:
            raise CheckpointError(
                f"step {saved} is saved, but {path_of(folder, step)}, an old one, cannot be removed: {error}"
            ) from error


def read(folder: Path, step: int | None) -> tuple[Path, dict[str, Any], Metadata] | None:
    """A checkpoint's path, description and metadata, after a look at whether it is whole; None if there is none."""
    there = steps(folder)
    if step is None and not there:
        return None
    path = path_of(folder, there[-1] if step is None else step)
    if not path.is_dir():
        raise CheckpointError(f"there is no {path}; the steps saved are {', '.join(map(str, there)) or 'none'}")
    try:
        description = _description(path)
        if description is None:
            raise CheckpointError(f"{path} is no checkpoint of Echelon's: it has no {DESCRIPTION} that says so")
        try:
            metadata = FileSystemReader(path).read_metadata()
        except Exception as error:  # whatever unpickling a damaged file raises
            raise CheckpointError(f"{path / '.metadata'} cannot be read ({type(error).__name__}: {error})") from error
        _check_files(path, metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {advice(folder, path)}") from error
    return path, description, metadata


def check_tensors(path: Path, metadata: Metadata, mine: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """That the checkpoint has all tensors of this model, in their shapes and dtypes, and no others."""
    stored: dict[str, Any] = metadata.state_dict_metadata
    for name, (shape, dtype) in mine.items():
        if name not in stored:
            raise of_another_run(path, f"it has no {name}")
        theirs, their_dtype = tuple(stored[name].size), stored[name].properties.dtype
        if (theirs, their_dtype) != (shape, dtype):
            raise of_another_run(path, f"its {name} is {their_dtype} {list(theirs)}, here it is {dtype} {list(shape)}")
    for name in stored:
        if name.startswith("model.") and name not in mine:
            raise of_another_run(path, f"it has {name}, which is not in the model")


def of_another_run(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} is not of this run: {problem}. Set it as it was, or start in another folder")


def advice(folder: Path, bad: Path) -> str:
    """What to do about a checkpoint that cannot be loaded."""
    others = [step for step in complete(folder) if path_of(folder, step) != bad]
    if others:
        return f"Step {others[-1]} is complete: remove {bad} to continue from there"
    return f"There is no other: remove {bad} to start anew"


def _description(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((path / DESCRIPTION).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def _check_files(path: Path, metadata: Metadata) -> None:
    for name, length in lengths_of_files(metadata).items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing (do all ranks see the same folder?)")
        if file.stat().st_size < length:
            raise CheckpointError(f"{file} is truncated: it has {file.stat().st_size} bytes instead of {length}")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
