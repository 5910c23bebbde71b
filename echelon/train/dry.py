"""What a run would be, without running it: the resolved config, and what each rank would hold and send in a step.

What the loop adds, and the meter, is left out: a few bytes a step and a row.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from echelon.launch.report import ranks_text
from echelon.parallel.apply import spans_of
from echelon.parallel.pipeline.partition import linked
from echelon.parallel.pipeline.schedule import make
from echelon.parallel.pipeline.simulate import Costs, simulate
from echelon.plan.images import Images
from echelon.plan.traffic import averaging, traffic
from echelon.train.checks import attended, example, meta_model, micro_batch, passes
from echelon.train.config import Config, dump
from echelon.train.memory import images_of, planned_optimizer, predicted

_MIB = 2**20
_FEW = 5  # names that are listed
_KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "rest": "activations"}


def show(config: Config) -> None:
    """Print it; the config's layout is resolved."""
    console, model = Console(soft_wrap=True), meta_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(dump(config), highlight=False, markup=False)
    console.print(config.layout.draw(), highlight=False, markup=False)
    console.print(
        f"{parameters:,} parameters; a step has {config.train.batch:,} samples"
        f"{f' of {config.length:,} tokens' if config.length else ''}, in {passes(config)} "
        f"pass{'es' * (passes(config) > 1)} of {micro_batch(config)} on each rank",
        highlight=False,
    )
    if config.layout.depth > 1:
        console.print(_pipeline(config, model), highlight=False)
    images = images_of(config, model)
    console.print(_held(config, images))
    if config.layout.size > 1:
        console.print(_sent(config, model, images))


def _pipeline(config: Config, model: Any) -> str:
    """What stages there are, and how long they wait."""
    strategies, layout = config.strategies, config.layout
    schedule = make(strategies.schedule, layout.depth, passes(config), chunks=strategies.chunks)
    spans = spans_of(model, layout, strategies, example(config, layout))
    parts = [[name for link in span for name in linked(model).parts(link)] for span in spans]
    links = [", ".join(names) if len(names) < _FEW else f"{names[0]} to {names[-1]}" for names in parts]
    return "\n".join(
        [
            f"{schedule.name}: {schedule.stages} stages, a bubble of {simulate(schedule, Costs()).bubble:.1%} if all "
            "stages take the same time and backward twice that of forward",
            *(f"  stage {stage}: {names}" for stage, names in enumerate(links)),
        ]
    )


def _held(config: Config, images: Images | None) -> Table | str:
    ranks = predicted(config, at_peak=True, images=images)
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


def _sent(config: Config, model: Any, images: Images | None) -> Table:
    table = Table("ranks", "dimension", "operation", title="MiB of payload in a step", box=SIMPLE_HEAD)
    table.title_justify = "left"
    table.add_column("payload", justify="right")
    layout, count, length = config.layout, passes(config), attended(config)
    of_a_pass = count > 1 and layout.depth == 1
    batch, microbatches = (config.train.batch // count, 1) if of_a_pass else (config.train.batch, count)
    given = example(config, layout)
    same: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank in range(layout.size):
        sent = traffic(
            model,
            layout,
            config.strategies,
            batch,
            length,
            rank,
            microbatches=microbatches,
            example=given,
            images=images,
        )
        same[tuple(sorted(sent.items())), _averaged(config, model, rank)].append(rank)
    for (lines, averaged), ranks in same.items():
        for number, ((view, operation), payload) in enumerate(lines):
            table.add_row("" if number else ranks_text(ranks), view, operation, f"{payload / _MIB:,.3f}")
        for (view, operation), payload in averaged:
            when = f"{operation}, every {config.strategies.average_every} steps"
            table.add_row("" if lines else ranks_text(ranks), view, when, f"{payload / _MIB:,.3f}")
    if of_a_pass:
        table.title = f"MiB of payload in the last of the {count} passes of a step"
    return table


def _averaged(config: Config, model: Any, rank: int) -> tuple[Any, ...]:
    """What an averaging of local SGD sends."""
    if not config.strategies.average_every:
        return ()
    sent = averaging(model, config.layout, config.strategies, planned_optimizer(config), rank)
    return tuple(sorted(sent.items()))
