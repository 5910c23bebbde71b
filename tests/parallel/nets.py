"""Small models with what makes data parallelism hard, their data, and how one process trains them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

WORDS, WIDTH, INNER, LENGTH, SAMPLES = 13, 9, 14, 6, 16


class Block(nn.Module):
    """Odd sizes, so that parts are padded; a bias of one element, fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embedding and head, a frozen parameter, one that only some samples use, one that none uses."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x.to(block.gain.dtype)).to(x.dtype)
        if (tokens[:, 0] == 0).any():
            x = x + self.extra(x) * (tokens[:, :1, None] == 0)
        return summed_loss(self.head(x), targets)


class SplitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class SplitNet(nn.Module):
    """For tensor parallelism with PyTorch's own styles: `split` splits it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.tokens = nn.Embedding(14, 8)
        self.blocks = nn.ModuleList(SplitBlock() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 14)
        self.gain = nn.Parameter(torch.ones(1))  # stays a plain tensor, the same on all ranks

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return summed_loss(self.head(self.norm(x)) * self.gain, targets)

    def split(self, mesh: DeviceMesh) -> None:
        plan: dict[str, Any] = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        for block in range(len(self.blocks)):
            plan |= {
                f"blocks.{block}.norm": SequenceParallel(),
                f"blocks.{block}.up": ColwiseParallel(input_layouts=Shard(1)),
                f"blocks.{block}.down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(self, mesh, plan)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A global batch, of which only the first sample uses `extra`."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    tokens[0, 0] = 0
    return tokens, torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)


@dataclass
class Result:
    """What a training run gave: of each step its loss, norm and gradients, and the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train_alone(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer], max_norm: float | None = None, steps: int = 5
) -> Result:
    """One process, all samples, plain PyTorch; parameters of low precision have a copy in fp32 that is updated."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = {
        name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        for name, parameter in trainable.items()
    }
    optimizer = make(masters.values())
    result = Result()
    for step in range(steps):
        tokens, targets = batch(step)
        loss = model(tokens, targets) / targets.numel()
        loss.backward()
        for name, parameter in trainable.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            masters[name].grad = gradient.to(masters[name].dtype)
        result.gradients.append({name: parameter.grad.clone() for name, parameter in masters.items()})
        limit = float("inf") if max_norm is None else max_norm
        result.losses.append(loss.item())
        result.norms.append(nn.utils.clip_grad_norm_(masters.values(), limit).item())
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for name, parameter in trainable.items():
                parameter.copy_(masters[name])
    result.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


def error(one: Any, other: Any) -> float:
    """The largest relative error, in norm, between two results' tensors or numbers."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        return max(error(one[name], other[name]) for name in one)
    if isinstance(one, list):
        assert len(one) == len(other)
        return max(error(a, b) for a, b in zip(one, other))
    a, b = (torch.as_tensor(each, dtype=torch.float64, device="cpu") for each in (one, other))
    assert a.shape == b.shape
    found = ((a - b).norm() / max(b.norm().item(), 1e-30)).item() if b.any() else a.norm().item()
    return math.inf if math.isnan(found) else found
