"""`echelon plan schedule NAME`: the timeline of a pipeline schedule, its figures, and the closed forms beside them.

What does the work is imported when the command runs, since every other command imports this module too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from echelon.launch.say import fail

if TYPE_CHECKING:
    from echelon.parallel.pipeline.simulate import Timeline
    from echelon.plan.schedule_forms import Form

REFUSED = 2
_PICTURES = (".svg", ".png")


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            help="gpipe, 1f1b, interleaved, zero-bubble, gems, gems-gpipe, chimera, pipedream or pipedream-2bw.",
            show_default=False,
        ),
    ],
    stages: Annotated[int, typer.Option(help="Ranks of the pipeline (D), each with its share of the model.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step (N); of pipedream, of the window.")] = 8,
    chunks: Annotated[
        Optional[int],
        typer.Option(help="Stages a rank (v), of interleaved alone (default: 2).", show_default=False),
    ] = None,
    forward: Annotated[float, typer.Option(help="What a rank's share costs a microbatch, in any unit.")] = 1.0,
    backward_input: Annotated[float, typer.Option(help="The same, of gradients of its input.")] = 1.0,
    backward_weight: Annotated[float, typer.Option(help="The same, of gradients of its weights.")] = 1.0,
    latency: Annotated[float, typer.Option(help="What a message between ranks takes.")] = 0.0,
    out: Annotated[
        Optional[Path], typer.Option("-o", "--out", help="Draw it into a picture (.svg, .png).", show_default=False)
    ] = None,
) -> None:
    """Draw a pipeline schedule, with its makespan, bubble, activations and weights."""
    from echelon.parallel.pipeline.draw import shape
    from echelon.parallel.pipeline.schedule import make
    from echelon.parallel.pipeline.simulate import Costs, simulate
    from echelon.parallel.pipeline.terminal import terminal

    if out is not None and out.suffix not in _PICTURES:
        fail(
            f"{out} is no picture that can be drawn here: choose a name that ends in {' or '.join(_PICTURES)}", REFUSED
        )
    stages_a_rank = chunks if chunks is not None else 2 if name == "interleaved" else 1
    try:
        made = make(name, stages, microbatches, chunks=stages_a_rank)
        share = 1 / made.chunks
        costs = Costs(forward * share, backward_input * share, backward_weight * share, latency)
        timeline = simulate(made, costs)
    except ValueError as error:
        fail(str(error), REFUSED)
    if out is not None:
        _draw(timeline, out)
    console = Console(highlight=False)
    coloured = console.is_terminal and not console.no_color
    console.print(f"[bold]{name}[/]: {shape(made)}\n")
    console.print(terminal(timeline, console.width, colour=coloured), soft_wrap=True)
    console.print(_figures(timeline, (backward_input + backward_weight) / (forward or 1.0), latency))


def _draw(timeline: Timeline, file: Path) -> None:
    from echelon.parallel.pipeline.draw import png, svg

    try:
        if file.suffix == ".svg":
            file.write_text(svg(timeline), encoding="utf-8")
        else:
            png(timeline, file)
    except ModuleNotFoundError:
        fail("a .png needs matplotlib: pip install 'echelon[plot]', or choose .svg")
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}", REFUSED)


def _figures(timeline: Timeline, backward: float, latency: float) -> Table:
    """`backward` in forwards."""
    from echelon.plan.schedule_forms import closed_forms

    forms = closed_forms(timeline.schedule, backward=backward)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("\n", "\nsimulated", "\nclosed form", "", "\nassumes"):
        table.add_column(column, no_wrap=column != "\nsimulated")
    table.add_row("makespan", f"{timeline.makespan:.6g}")
    bubble = forms.bubble
    assumes = ", ".join(filter(None, [bubble.assumes, "no latency" if latency else ""]))
    table.add_row("bubble", f"{timeline.bubble:.1%}", f"{bubble.least:.1%}", bubble.formula, assumes)
    held = (("activations", timeline.activations, forms.activations), ("weights", timeline.weights, forms.weights))
    for name, counts, form in held:
        by_rank = " ".join(f"{count / timeline.schedule.chunks:.4g}" for count in counts)
        table.add_row(name, by_rank, _values(form), form.formula, form.assumes)
    return table


def _values(form: Form) -> str:
    return f"{form.least:.4g}" if form.least == form.most else f"{form.least:.4g} … {form.most:.4g}"
