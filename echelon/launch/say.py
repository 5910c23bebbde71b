"""How the commands speak to the user: what is wrong, and how far they are."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status


def say(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[red]echelon:[/] {escape(message)}", highlight=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """Say it, and end."""
    say(message)
    raise typer.Exit(code)


def busy(with_what: str) -> Status:
    """A sign of life on a terminal, while something takes long."""
    return Console(stderr=True).status(escape(with_what))


def bar_of_ranks(terminal: int, shown: bool, width: int) -> Progress:
    """A bar that the first rank draws, with descriptions of that width. A rank writes into the launcher's pipe; if that
    ends in a terminal, of so many columns, the bar is drawn all the same.
    """
    console = Console(stderr=True, force_terminal=bool(terminal) or None, width=terminal or None)
    columns = (TextColumn(f"{{task.description:{width}}}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not shown, auto_refresh=False, transient=bool(terminal))
