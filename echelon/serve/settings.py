"""How an engine works: its limits, and what it promises."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.serve.attention import BLOCK
from echelon.serve.slo import Slo


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The defaults are for most."""

    page_size: int = 16  # tokens
    cache_gib: float = 0.0  # memory for keys and values on each rank; 0: a share of what is free
    context: int = 0  # most tokens of a prompt with its answer; 0: the model's
    token_budget: int = 512  # most tokens of a step
    most_running: int = 64  # requests in a step
    most_waiting: int = 1024  # requests; more are refused
    reproducible: bool = False  # whether an answer's bits depend on nothing but its request
    slo: Slo | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "token_budget", "most_running", "most_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("cache_gib", "context"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: it cannot be negative")
        if BLOCK % self.page_size:
            raise ValueError(f"page_size={self.page_size} does not divide {BLOCK}: use 8, 16, 32 or 64")
