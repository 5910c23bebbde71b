"""The command `echelon bench`: reads and checks what is asked for, then starts ranks, or is one already.

What imports torch is imported when the command runs, since every other command imports this module too.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echelon.launch.find import Installation, NoMPI, Rejected, find
from echelon.launch.identity import identity
from echelon.launch.say import fail, say
from echelon.launch.start import Job, run

if TYPE_CHECKING:
    from echelon.bench.options import Options

TRAIN, SERVE = "train", "serve"
_OUTPUT = "bench-results"
_PICTURES = (".png", ".svg", ".pdf")
_WHAT, _HOW, _WHERE = "What is measured", "How it is measured", "What is written"


def bench(
    name: Annotated[
        Optional[str],
        typer.Argument(help="The benchmark; `all` runs the suite; without it they are listed.", show_default=False),
    ] = None,
    ranks: Annotated[
        Optional[int], typer.Option("-n", "--ranks", help="How many ranks to start (default: 2).", show_default=False)
    ] = None,
    hosts: Annotated[str, typer.Option(help="Where: host1,host2 or host1:4,host2:4 (default: here).")] = "",
    sizes: Annotated[
        Optional[str],
        typer.Option("-m", metavar="[MIN:]MAX", help="Bytes of a message: 4:16M, or 1M.", rich_help_panel=_WHAT),
    ] = None,
    transport: Annotated[
        str, typer.Option(help="Of mpi, gloo, raw (mpi4py alone); several stand side by side.", rich_help_panel=_WHAT)
    ] = "mpi",
    buffer: Annotated[
        str,
        typer.Option(help="Of torch, numpy, pickle, cupy, or module:function for others.", rich_help_panel=_WHAT),
    ] = "torch",
    device: Annotated[str, typer.Option(help="Where torch buffers are: cpu or cuda.", rich_help_panel=_WHAT)] = "cpu",
    iterations: Annotated[
        Optional[int],
        typer.Option("-i", "--iterations", help="Calls that are timed at each size.", rich_help_panel=_HOW),
    ] = None,
    warmup: Annotated[
        Optional[int], typer.Option("-x", "--warmup", help="Calls before them that are not.", rich_help_panel=_HOW)
    ] = None,
    validate: Annotated[
        bool, typer.Option("-c", "--validation", help="Check what every rank has received.", rich_help_panel=_HOW)
    ] = False,
    full: Annotated[
        bool, typer.Option("-f", "--full", help="Show minimum, maximum and iterations too.", rich_help_panel=_WHERE)
    ] = False,
    json: Annotated[str, typer.Option(metavar="FILE", help="The result as JSON.", rich_help_panel=_WHERE)] = "",
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="A picture: .png, .svg, .pdf.", rich_help_panel=_WHERE)
    ] = "",
    output: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help=f"Where `all` puts its report (default: {_OUTPUT}).", rich_help_panel=_WHERE
        ),
    ] = "",
) -> None:
    """Measure messages and collectives, in the form of the OSU micro-benchmarks; `echelon bench train` for training."""
    if name is None:
        _list()
        return
    from echelon.bench.options import Options, parse_sizes

    try:
        if name in (TRAIN, SERVE):
            raise ValueError(f"`echelon bench {name}` comes first, and then its options: see its --help")
        options = Options(
            name,
            *(parse_sizes(sizes) if sizes is not None else (None, None)),
            iterations,
            warmup,
            full,
            validate,
            several(transport),
            several(buffer),
            device,
            json,
            plot,
            output or _OUTPUT,
        )
        size = number_of_ranks(ranks)
        options.check(size)
        _check_files(options)
        mpi = launcher()
    except (ValueError, NoMPI) as error:
        refuse(error)
    if mpi is None:
        from echelon.bench.rank import main

        raise typer.Exit(main(options))
    console = Console(stderr=True)
    if console.is_terminal:
        options = replace(options, terminal=console.width)
    command = [sys.executable, "-m", "echelon.bench", options.to_text()]
    raise typer.Exit(run(Job(size, command, several(hosts)), mpi))


def number_of_ranks(asked: int | None) -> int:
    """As many as there are, if this is one of them already; else as are asked for, or two."""
    me = identity()
    if me.launcher == "torchrun":
        raise ValueError("torchrun makes no MPI world: use `echelon bench -n N …`, mpiexec or srun")
    if not me.in_mpi_world:
        return 2 if asked is None else asked
    if asked not in (None, me.size):
        raise ValueError(f"-n {asked}: this is already one of {me.size} ranks; leave -n out under an MPI launcher")
    return me.size


def launcher() -> Installation | None:
    """The MPI to start ranks with; none if this is a rank already."""
    return None if identity().in_mpi_world else find(passed_over=_pass_over)


def refuse(error: Exception) -> NoReturn:
    """The first rank says it for all."""
    if identity().rank:
        raise typer.Exit(2) from None
    fail(str(error), 2)


def several(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _check_files(options: Options) -> None:
    from echelon.bench.catalogue import ALL

    if options.name == ALL and (options.json or options.plot):
        raise ValueError("--json and --plot are for one benchmark: `all` writes both into its --output folder")
    if options.plot and not options.plot.endswith(_PICTURES):
        raise ValueError(f"--plot {options.plot}: the name must end in {', '.join(_PICTURES)}")
    if options.plot and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'echelon[plot]'")


def _list() -> None:
    from echelon.bench.catalogue import ALL, BENCHMARKS

    table = Table(box=None, header_style="bold")
    for column in ("name", "ranks", "what it measures"):
        table.add_column(column, overflow="fold")
    for benchmark in BENCHMARKS.values():
        ranks = {"two": "2", "even": "2, 4, 6, …", "any": "2 or more"}[benchmark.ranks]
        table.add_row(f"[cyan]{benchmark.name}[/]", ranks, escape(benchmark.what))
    table.add_row(f"[cyan]{ALL}[/]", "2 or more", "all that the number of ranks allows, into a folder with a report")
    table.add_row(f"[cyan]{TRAIN}[/]", "1 or more", "training of a model on synthetic data, beside one rank alone")
    table.add_row(
        f"[cyan]{SERVE}[/]", "none", "a server that answers: times to tokens, throughput, as `vllm bench serve`"
    )
    console = Console()
    console.print(table)
    console.print("\ntry [bold]echelon bench allreduce -n 2 -m 4:1M -c[/], and [bold]echelon bench --help[/]")
    console.print("[bold]echelon bench train --model resnet50 -n 2[/] has options of its own: add [bold]--help[/]")
    console.print("[bold]echelon bench serve --base-url http://127.0.0.1:8000[/] has, too")


def _pass_over(other: Rejected) -> None:
    say(f"passing over {other.mpiexec}: {other.reason}")
