"""Models in plain PyTorch, built from parts that can be replaced. They know nothing of parallelism.

What is named here is imported when it is used: tokenizers need no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.models.presets import build

__all__ = ["build"]


def __getattr__(name: str) -> Any:
    if name != "build":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from echelon.models.presets import build

    return build
