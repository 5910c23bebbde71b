"""Models in plain PyTorch, built from parts that can be replaced. They know nothing of parallelism."""

from echelon.models.presets import build

__all__ = ["build"]
