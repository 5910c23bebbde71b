"""How an engine works: its limits, and what it promises."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from echelon.serve.attention import BLOCK
from echelon.serve.slo import Slo


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The defaults are for most."""

    page_size: int = 16  # tokens
    cache_gib: float = 0.0  # memory for keys and values on each rank; 0: a share of what is free
    context: int = 0  # most tokens of a prompt with its answer; 0: the model's
    token_budget: int = 0  # most tokens of a step; 0: 512 on a CPU, 8192 on a GPU
    most_running: int = 0  # requests in a step; 0: 64 on a CPU, 256 on a GPU
    most_waiting: int = 1024  # requests; more are refused
    reproducible: bool = False  # whether an answer's bits depend on nothing but its request
    slo: Slo | None = None
    fused: bool = True  # on a GPU: whether the engine's own kernels are used, where they can be
    graphs: bool = True  # with those: whether steps that are not large are CUDA graphs
    ahead: bool = True  # with those, on one rank: whether a step is launched before the last one's tokens are known

    def __post_init__(self) -> None:
        for name in ("page_size", "most_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("cache_gib", "context", "token_budget", "most_running"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: it cannot be negative")
        if BLOCK % self.page_size:
            raise ValueError(f"page_size={self.page_size} does not divide {BLOCK}: use 8, 16, 32 or 64")

    def on(self, device: torch.device) -> Settings:
        """With the limits that are left open, as they are best on a device."""
        budget, running = (8192, 256) if device.type == "cuda" else (512, 64)
        return replace(self, token_budget=self.token_budget or budget, most_running=self.most_running or running)
