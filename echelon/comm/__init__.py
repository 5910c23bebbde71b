"""The process group, and all that moves bytes behind it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.comm.choose import route
    from echelon.comm.recorder import record

__all__ = ["record", "route"]


def __getattr__(name: str) -> Any:
    """Loaded when first used: `import torch` passes through here."""
    if name == "record":
        from echelon.comm.recorder import record

        return record
    if name == "route":
        from echelon.comm.choose import route

        return route
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
