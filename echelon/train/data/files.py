"""The documents that a user names: files, folders, patterns, and Python's own standard library.

Always in the same order: as named, and inside a folder or pattern sorted by path. What is found in a folder and is not
UTF-8 text is passed over; what is named itself must be.
"""

from __future__ import annotations

import codecs
import glob
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from echelon.train.data.errors import DataError

_LOOKED_AT = 8192  # bytes of a file, to see whether it is text
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}  # of the standard library


def find(inputs: Sequence[str], passed_over: Callable[[Path], None] = lambda path: None) -> list[Path]:
    """The files of all inputs."""
    found = []
    for given in inputs:
        for path in _find(given):
            if is_text(path):
                found.append(path)
            else:
                passed_over(path)
    if not found:
        raise DataError(f"there is no text in {', '.join(inputs)}")
    return found


def is_text(path: Path) -> bool:
    """Whether a file that is not empty begins as UTF-8 text does."""
    try:
        with path.open("rb") as file:
            begin = file.read(_LOOKED_AT)
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except (OSError, UnicodeDecodeError):
        return False
    return bool(begin) and b"\0" not in begin


def _find(given: str) -> list[Path]:
    if given == "python":
        library = Path(sysconfig.get_path("stdlib"))
        return [path for path in _inside(library, _LEFT_OUT) if path.suffix == ".py"]
    path = Path(given).expanduser()
    if path.is_dir():
        return _inside(path, {"__pycache__"})
    if path.exists():
        return [_text(path)]
    matching = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))]
    if not matching:
        raise DataError(f"there is no file or folder {given}")
    return [each for each in matching if each.is_file()]


def _inside(folder: Path, left_out: set[str]) -> list[Path]:
    """All files of a folder, but those in folders that are left out, and hidden ones."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _text(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            begin = file.read(1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not begin:
        raise DataError(f"{path} is empty")
    if not is_text(path):
        raise DataError(f"{path} is not UTF-8 text; if it holds tokens, use the kind `tokens`")
    return path
