"""`echelon runs`: the runs that there are, some of them side by side, and what can be made of one afterwards."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echelon.launch.say import fail
from echelon.trace.units import show_count
from echelon.train.compare import differences, figures, names_of, write_compare
from echelon.train.report import write_report
from echelon.train.run_folder import NoRun, Run, is_run, open_run

RUNS = Path("runs")
_WIDE = 140  # columns of a table that does not go to a terminal
_COLOURS = {"done": "green", "running": "cyan", "stopped": "yellow", "failed": "red"}

runs_app = typer.Typer(help="List runs, compare them, write a report anew, export a model.", add_completion=False)


@runs_app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    folder: Annotated[Path, typer.Option("--dir", help="Where the runs are.")] = RUNS,
) -> None:
    """List the runs, or do something with one of them."""
    context.obj = folder
    if context.invoked_subcommand is None:
        _list(folder)


@runs_app.command()
def compare(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or folders.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("compare.html"),
) -> None:
    """Show in what runs differ, in their settings and in what came of them, and lay their curves over each other."""
    found = [_open(context.obj, name) for name in names]
    if len(found) < 2:
        fail("comparing needs two runs or more: echelon runs compare A B")
    console, titles = _console(), names_of(found)
    for title, told in (("settings that differ", differences(found)), ("figures", figures(found))):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column(title)
        for name in titles:
            table.add_column(escape(name), justify="right")
        for name, values in told.items():
            table.add_row(escape(name), *map(escape, values))
        console.print(table if told else f"[dim]{title}: none[/]")
    console.print(f"curves: {escape(str(write_compare(found, out)))}", highlight=False, soft_wrap=True)


@runs_app.command()
def report(
    context: typer.Context, name: Annotated[str, typer.Argument(metavar="RUN", help="Its name or folder.")]
) -> None:
    """Write a run's report.html anew."""
    print(write_report(_open(context.obj, name).folder))


@runs_app.command()
def export(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="RUN", help="Its name or folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    step: Annotated[Optional[int], typer.Option(help="Of which step (default: the newest checkpoint).")] = None,
) -> None:
    """Write a run's model as a Hugging Face folder."""
    from echelon.train.export import export as write

    try:
        write(_open(context.obj, name).folder, out, step)
    except (OSError, RuntimeError, ValueError) as error:
        fail(str(error))
    print(out)


def _list(folder: Path) -> None:
    found = [open_run(each) for each in sorted(folder.iterdir()) if is_run(each)] if folder.is_dir() else []
    if not found:
        fail(f"there are no runs in {folder}: `echelon train CONFIG` makes one, --dir looks elsewhere")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "model", "layout"):
        table.add_column(name, overflow="fold")
    for name in ("ranks", "step", "loss", "tok/s", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("state", "when"):
        table.add_column(name, no_wrap=True)
    for run in sorted(found, key=lambda run: run.when or 0):
        table.add_row(*map(escape, _cells(run)[:-2]), f"[{_COLOURS.get(run.state, '')}]{run.state}[/]", _cells(run)[-1])
    _console().print(table)


def _cells(run: Run) -> list[str]:
    share = run.typical("mfu")
    speed = "" if run.speed is None else show_count(run.speed) + (" img/s" if run.unit == "images" else "")
    return [
        run.name,
        run.model,
        run.layout.removeprefix("Layout(").removesuffix(")") or "",
        "" if run.ranks is None else str(run.ranks),
        f"{run.step}/{run.steps}" if run.steps else str(run.step),
        "" if run.loss is None else f"{run.loss:.4f}",
        speed,
        "" if share is None else f"{share:.1%}",
        run.state,
        datetime.fromtimestamp(run.when).strftime("%Y-%m-%d %H:%M") if run.when else "",
    ]


def _open(folder: Path, name: str) -> Run:
    """By its name among the runs, or by its path."""
    for path in (folder / name, Path(name)):
        if is_run(path):
            return open_run(path)
    try:
        return open_run(Path(name))
    except NoRun:
        there = ", ".join(each.name for each in sorted(folder.iterdir()) if is_run(each)) if folder.is_dir() else ""
        fail(
            f"there is no run {name!r} in {folder}{f': there are {there}' if there else ', nor a folder of that name'}"
        )


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)
