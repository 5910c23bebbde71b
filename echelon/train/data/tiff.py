"""The library for TIFF, if it is there."""

from __future__ import annotations

from typing import Any

from echelon.train.data.errors import DataError


def tifffile() -> Any:
    try:
        import tifffile as library
    except ModuleNotFoundError:
        raise DataError("to read and write TIFF: pip install tifffile") from None
    return library
