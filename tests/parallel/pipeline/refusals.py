"""What ranks of a pipeline are told where something is wrong. Each ends before a message is under way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.models.chain import Chain
from echelon.parallel.pipeline.crews import held
from echelon.parallel.pipeline.partition import partition
from echelon.parallel.pipeline.run import Pipeline
from echelon.parallel.pipeline.schedule import forward_only, make

GIVEN = [(torch.ones(1, 2),)] * 2


def piped(name: str, *modules: nn.Module, ranks: int = 2, microbatches: int = 2, forwards: bool = False) -> Pipeline:
    chain, schedule = Chain(*modules), make(name, ranks, microbatches)
    spans = partition(chain, ranks, [1] * ranks)
    chain.keep(held(schedule, spans), dist.get_rank())
    group: Any = dist.group.WORLD
    return Pipeline(chain, spans, forward_only(schedule) if forwards else schedule, group)


def total(out: Tensor, _: int) -> Tensor:
    return out.sum()


def linears(count: int = 2) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


def wrong_number() -> None:
    piped("1f1b", *linears()).run(GIVEN[:1], total)


def wrong_number_forward() -> None:
    piped("1f1b", *linears()).forward(GIVEN * 2)


def other_group() -> None:
    piped("1f1b", *linears(4), ranks=4)


def other_spans() -> None:
    group: Any = dist.group.WORLD
    Pipeline(Chain(*linears()), [range(2)], make("1f1b", 2, 2), group)


def no_optimizer() -> None:
    piped("pipedream", *linears()).run(GIVEN, total)


def no_optimizer_for_one() -> None:
    piped("pipedream", *linears(), microbatches=1).run(GIVEN[:1], total)


def tied_versions() -> None:
    tied = nn.Linear(2, 2, bias=False)
    piped("pipedream", tied, tied)


def nothing_held() -> None:
    piped("1f1b", nn.Tanh(), nn.Tanh())


def no_backward() -> None:
    piped("1f1b", *linears(), forwards=True).run(GIVEN, total)


def list_given() -> None:
    piped("1f1b", *linears()).run([{"input": torch.ones(1, 2), "sizes": [1, 2]}] * 2, total)


class Grows(nn.Module):
    """Gives more with every call: what no shape of its arguments says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(2, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += self.linear.training
        return self.linear(x).expand(self.rows, 2)


class Told(nn.Module):
    """Gives what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), {"hidden": x}


def other_shapes() -> None:
    """In the second run of equal arguments; rank 1, which would wait, has no second run."""
    pipe = piped("gpipe", Grows(), nn.Linear(2, 2))
    pipe.run(GIVEN, total)
    if pipe.rank == 0:
        pipe.run(GIVEN, total)


def no_tensor() -> None:
    pipe = piped("gpipe", Told(), nn.Linear(2, 2))
    if pipe.rank == 0:
        pipe.run(GIVEN, total)


def said(what: str) -> str:
    try:
        globals()[what]()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
