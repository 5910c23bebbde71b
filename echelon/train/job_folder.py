"""A run's folder as the job that trains in it has it: its own alone, for this config and this data."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from echelon.train.checkpoint_folder import complete
from echelon.train.config import Config, ConfigError, dump

_LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without locks says


def new_folder(name: str) -> Path:
    """Make a folder in runs/ that nobody else has."""
    Path("runs").mkdir(exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise ConfigError(f"runs/{stem} and a thousand more are there: name a folder (--run)")


def open_folder(config: Config, folder: Path | str | None) -> tuple[Path, IO[str] | None]:
    """The run's folder, a new one if none is given, and on the first rank a lock: while that is open, the folder is not
    for other jobs. Called by all ranks.
    """
    answer: list[Any] = [None, None]
    lock = None
    if dist.get_rank() == 0:
        try:
            found = Path(folder) if folder is not None else new_folder(config.name)
            refuse_other_run(config, found)
            found.mkdir(parents=True, exist_ok=True)
            lock = _lock(found)
            answer[0] = found
        except OSError as error:
            answer[1] = f"{folder or 'runs'} cannot be written: {error.strerror}"
        except ConfigError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise ConfigError(answer[1])
    return Path(answer[0]), lock


def refuse_other_run(config: Config, folder: Path) -> None:
    """A folder that another job trains in is not for this one; with resume = "never", neither is one that a run has
    left checkpoints in.
    """
    if (folder / _LOCK).exists():
        _lock(folder).close()
    if config.checkpoint.resume == "never" and (steps := complete(folder / "checkpoints")):
        raise ConfigError(
            f'[checkpoint] resume = "never", but {folder} has a run that was saved at step {steps[-1]}: use another '
            'folder (--run), or resume = "auto" to go on with it'
        )


def same_data(saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """That a run goes on with the samples that it began with, in the same order."""
    for name, value in mine.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"the run was saved with other data: its {_DATA[name]} was {saved.get(name)}, and is now {value}. Set "
                "it as it was, or begin a new run from what it has learned (echelon runs export, echelon train --init)"
            )


_DATA = {"samples": "number of samples to train on", "length": "[data] length", "seed": "[train] seed"}


def write_config(config: Config, folder: Path) -> None:
    """By the first rank; a kill leaves the old one or the new one."""
    if dist.get_rank() == 0:
        new = folder / "config.toml.new"
        new.write_text(dump(config))
        os.replace(new, folder / "config.toml")


def _lock(folder: Path) -> IO[str]:
    file = (folder / _LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{folder} is in use: another job trains in it now") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return file
