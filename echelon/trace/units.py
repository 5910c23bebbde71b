"""Figures as people read them."""

from __future__ import annotations


def show_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def show_seconds(time: float) -> str:
    if time >= 1:
        return f"{time:.3g} s"
    return f"{time * 1e3:.3g} ms" if time >= 1e-3 else f"{time * 1e6:.3g} µs"


def show_count(count: float) -> str:
    """Three digits, and what they are thousands of: 41.2k, 124M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}P"


def show_clock(seconds: float) -> str:
    """A time to wait, or one that has passed: 3:12, 1:02:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
