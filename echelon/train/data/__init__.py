"""Where samples come from, and which rank sees which of them when.

A sample has a number, and the number says everything about it: its tokens, what of them is masked, how its image is
cut. So the order of samples is the same in every layout, and the place of a run in its data is one number, the samples
consumed so far. What is named here is imported when it is used: `echelon data` needs no PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.train.data.errors import DataError
    from echelon.train.data.loader import Loader
    from echelon.train.data.order import Order
    from echelon.train.data.source import Source, Sources
    from echelon.train.data.sources import open_sources

__all__ = ["DataError", "Loader", "Order", "Source", "Sources", "open_sources"]
_HOMES = {
    "DataError": "errors",
    "Loader": "loader",
    "Order": "order",
    "Source": "source",
    "Sources": "source",
    "open_sources": "sources",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
