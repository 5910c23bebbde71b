"""A chain that is no model of ours: tuples of dtypes, shapes that vary, skips that jump stages, a tied weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.models.chain import Chain
from echelon.parallel.pipeline.crews import held
from echelon.parallel.pipeline.mail import exchange
from echelon.parallel.pipeline.partition import partition
from echelon.parallel.pipeline.run import OutOfMemoryError, Pipeline
from echelon.parallel.pipeline.schedule import make
from tests.parallel.matrix import worse

WORDS, WIDTH = 11, 6


class Embed(nn.Module):
    """Gives the stream, and which places count: no gradient goes through those."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens), tokens > 2


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, counts: Tensor, *skipped: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.tanh(self.linear(x)) * counts.unsqueeze(-1)
        for each in skipped:
            out = out + each if each.is_floating_point() else out * (1 + each.unsqueeze(-1))
        return out, counts


class Shorten(Mix):
    """Every second place: the shape is another one from here on."""

    def forward(self, x: Tensor, counts: Tensor, *skipped: Tensor) -> tuple[Tensor, Tensor]:
        x, counts = super().forward(x, counts, *skipped)
        return x[:, ::2], counts[:, ::2]


class Out(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return (x @ self.weight.T).logsumexp(-1).mul(counts).sum()


def build() -> Chain:
    torch.manual_seed(3)
    embed = Embed()
    modules = [embed, *(Mix() for _ in range(5)), Shorten(), Out(embed.table)]
    return Chain(*modules, skips=[(0, 3), (1, 5), (0, 5)]).double()


def arguments(number: int, named: bool) -> Any:
    """Of a microbatch: samples and length are its own."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (1 + number % 3, 4 + number), generator=generator)
    return {"tokens": tokens} if named else (tokens,)


def piped(schedule: str, stages: int, microbatches: int, recompute: Sequence[int] = ()) -> Pipeline:
    """Over all ranks or, of one stage, over each for itself."""
    chain, planned = build(), make(schedule, stages, microbatches, chunks=2 if schedule == "interleaved" else 1)
    group = dist.group.WORLD if stages > 1 else by_itself()
    spans = partition(chain, planned.stages)
    chain.keep(held(planned, spans), dist.get_rank(group))
    return Pipeline(chain, spans, planned, group, recompute=recompute)


def by_itself() -> Any:
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def train(schedule: str, stages: int, microbatches: int, recompute: list[int], named: bool) -> dict[str, float]:
    """The largest errors of this rank's gradients beside one process, in two runs."""
    alone = build()
    total = 0.0
    for number in range(microbatches):
        loss = alone(*arguments(number, named=False))
        loss.backward()
        total += loss.item()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    pipe = piped(schedule, stages, microbatches, recompute)
    worst: dict[str, float] = defaultdict(float)
    for _ in range(2):  # in the second run shapes are known
        losses = pipe.run([arguments(number, named) for number in range(microbatches)], lambda out, _: out)
        own = torch.tensor(sum(loss.item() for loss in losses if loss is not None), dtype=torch.float64)
        dist.all_reduce(own, group=pipe.group)
        worst["loss"] = worse(worst["loss"], abs(own.item() / total - 1))
        for name, parameter in pipe.model.named_parameters():
            gradient = parameter.grad.clone()
            if pipe.schedule.is_bidirectional:  # there is no data strategy here that would sum over both directions
                other, twin = torch.empty_like(gradient), stages - 1 - pipe.rank
                exchange(pipe.group, [(gradient, twin)], [(other, twin)])
                gradient = gradient + other
            reference = expected[pipe.model.apart[name].name if name in pipe.model.apart else name]
            worst["gradient"] = worse(worst["gradient"], ((gradient - reference).norm() / reference.norm()).item())
        pipe.model.zero_grad()
    return dict(worst)


def outputs(schedule: str, stages: int, microbatches: int) -> float:
    """How far what comes out of a forward pass alone is from one process."""
    alone, pipe = build(), piped(schedule, stages, microbatches)
    given = [arguments(number, named=True) for number in range(microbatches)]
    found = pipe.forward(given)
    ends = [pipe.schedule.rank_of(pipe.schedule.stages - 1, pipe.schedule.direction_of(n)) for n in range(len(given))]
    assert [each is not None for each in found] == [rank == pipe.rank for rank in ends]
    pairs = [(ours, alone(**of)) for ours, of in zip(found, given, strict=True) if ours is not None]
    return max([0.0, *(abs((ours / theirs).item() - 1) for ours, theirs in pairs)])


def runs_out() -> str:
    """What is said of a stage whose forward pass does not fit."""

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.empty(2**50) * x

    chain, planned = Chain(nn.Linear(2, 2), Huge()), make("1f1b", 1, 1)
    pipe = Pipeline(chain, [range(2)], planned, by_itself())
    try:
        pipe.run([(torch.ones(1, 2),)], lambda out, _: out.sum())
    except OutOfMemoryError as error:
        return str(error)
    return ""
