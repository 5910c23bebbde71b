"""The commands of `echelon`, thin: each reads its arguments and calls what does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from echelon.bench.command import bench
from echelon.bench.serve_command import serve as bench_serve
from echelon.bench.train_command import train as bench_train
from echelon.comm.routes import NoRoute
from echelon.comm.tables import asked
from echelon.doctor import examine
from echelon.launch.cluster import ClusterSpec, NoCluster
from echelon.launch.find import NoMPI, find
from echelon.launch.say import fail, say
from echelon.launch.start import Job
from echelon.launch.start import run as start
from echelon.plan.schedule_command import schedule
from echelon.serve.command import generate, serve
from echelon.trace.command import trace
from echelon.train.command import train
from echelon.train.data.command import data_app
from echelon.train.runs import runs_app
from echelon.tune.command import tune


class _Commands(TyperGroup):
    """A command may have two words: `bench train` stands beside `bench`, whose next word is otherwise an argument."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        two = " ".join(args[:2])
        return (two, self.commands[two], args[2:]) if two in self.commands else super().resolve_command(ctx, args)


_STARTING_RANKS = ("run", "train", "serve", "generate", "bench", "bench train", "bench serve")
app = typer.Typer(
    cls=_Commands,
    help="MPI-driven deep learning on the PyTorch that people already have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main(context: typer.Context) -> None:
    """What is wrong with ECHELON_ROUTE is said once, before any rank starts."""
    if context.invoked_subcommand in _STARTING_RANKS:
        try:
            asked()
        except NoRoute as error:
            fail(str(error), 2)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    script: Annotated[str, typer.Argument(help="The Python script to run; `-m module` works too.", show_default=False)],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="Passed to the script.", show_default=False)] = None,
    ranks: Annotated[
        Optional[int], typer.Option("-n", "--ranks", min=1, help="How many ranks to start (default: 1).")
    ] = None,
    hosts: Annotated[str, typer.Option(help="Where: host1,host2 or host1:4,host2:4 (default: here).")] = "",
    cluster: Annotated[
        str,
        typer.Option(help="On an emulated cluster: nodes x ranks @ rate [+ latency], as 2x2@1gbit or 2x2@1gbit+1ms."),
    ] = "",
    prefix: Annotated[bool, typer.Option("--prefix", help="Begin each line of output with its rank.")] = False,
    record: Annotated[
        Optional[Path], typer.Option(help="A new folder for a record of all communication, for `echelon trace`.")
    ] = None,
) -> None:
    """Run a script on several ranks, with the machine's own MPI."""
    if record is not None and record.exists() and (not record.is_dir() or any(record.iterdir())):
        fail(f"{record} exists and is not an empty folder: a record needs one of its own")
    try:
        mpi = find(passed_over=lambda other: say(f"passing over {other.mpiexec}: {other.reason}"))
    except NoMPI as error:
        fail(str(error))
    command = [sys.executable, script, *(arguments or [])]
    names = tuple(host for host in hosts.split(",") if host)
    try:
        spec = ClusterSpec.asked(cluster, ranks, names)
        job = Job(spec.ranks if spec else ranks or 1, command, names, prefix, spec, record)
        raise typer.Exit(start(job, mpi))
    except NoCluster as error:
        fail(str(error))


app.command()(train)
app.command()(serve)
app.command()(generate)
app.add_typer(data_app, name="data")
app.add_typer(runs_app, name="runs")
plan_app = typer.Typer(help="What a layout will hold, send and take, before it runs.", no_args_is_help=True)
plan_app.command()(schedule)
app.add_typer(plan_app, name="plan")
app.command()(bench)
app.command("bench train")(bench_train)
app.command("bench serve", context_settings={"allow_extra_args": True})(bench_serve)  # --goodput has several words
app.command()(tune)
app.command()(trace)


@app.command()
def doctor() -> None:
    """Show what was found (MPI, PyTorch, GPUs), what is missing, and the command that mends it."""
    console = Console()
    with console.status("looking"):
        findings = examine()
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row("[green]✓[/]" if finding.good else "[red]✗[/]", escape(finding.subject), escape(finding.text))
    console.print(table)
    wrong = [finding for finding in findings if not finding.good]
    for finding in wrong:
        console.print(f"[red]{escape(finding.subject)}[/]: to mend it: [bold]{escape(finding.mend)}[/]")
    if wrong:
        raise typer.Exit(1)
    console.print("[green]all is well[/]: try [bold]echelon run -n 2 your_script.py[/]")


if __name__ == "__main__":
    app()
