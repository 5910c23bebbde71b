"""What a run would be, without running it: the resolved config, and what each rank would hold and send in a step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from echelon.launch.report import ranks_text
from echelon.plan.traffic import traffic
from echelon.train.checks import meta_model, micro_batch
from echelon.train.config import Config, dump
from echelon.train.memory import predicted

_MIB = 2**20
_KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "rest": "activations"}


def show(config: Config) -> None:
    """Print it; the config's layout is resolved."""
    console, model = Console(soft_wrap=True), meta_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    passes = config.train.batch // config.layout.dp // micro_batch(config)
    console.print(dump(config), highlight=False, markup=False)
    console.print(config.layout.draw(), highlight=False, markup=False)
    console.print(
        f"{parameters:,} parameters; a step has {config.train.batch:,} samples"
        f"{f' of {config.length:,} tokens' if config.length else ''}, in {passes} "
        f"pass{'es' * (passes > 1)} of {micro_batch(config)} on each rank",
        highlight=False,
    )
    console.print(_held(config))
    if config.layout.size > 1:
        console.print(_sent(config, model, passes))


def _held(config: Config) -> Table | str:
    ranks = predicted(config, config.layout)
    if ranks is None:
        return f"what a rank holds is not planned for {config.strategies.precision}"
    table = Table("ranks", title="MiB that a rank holds", box=SIMPLE_HEAD, title_justify="left")
    for name in (*_KINDS.values(), "on the host"):
        table.add_column(name, justify="right")
    same: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, kinds in enumerate(ranks):
        same[tuple(kinds[kind] for kind in (*_KINDS, "host"))].append(rank)
    for held, alike in same.items():
        table.add_row(ranks_text(alike), *(f"{each / _MIB:,.1f}" if each else "–" for each in held))
    return table


def _sent(config: Config, model: Any, passes: int) -> Table:
    table = Table("ranks", "dimension", "operation", title="MiB of payload in a step", box=SIMPLE_HEAD)
    table.title_justify = "left"
    table.add_column("payload", justify="right")
    batch, length = config.train.batch // passes, config.length or _patches(config)
    same: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank in range(config.layout.size):
        sent = traffic(model, config.layout, config.strategies, batch, length, rank)
        same[tuple(sorted(sent.items()))].append(rank)
    for lines, ranks in same.items():
        for number, ((view, operation), payload) in enumerate(lines):
            table.add_row("" if number else ranks_text(ranks), view, operation, f"{payload / _MIB:,.3f}")
    if passes > 1:
        table.title = "MiB of payload in one pass of a step"
    return table


def _patches(config: Config) -> int:
    """What an image is for attention, if the model has any."""
    shape: Any = config.architecture
    return (shape.image // shape.patch) ** 2 if hasattr(shape, "patch") else 1
