"""How the commands speak to the user: what is wrong, and how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def say(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[red]echelon:[/] {escape(message)}", highlight=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """Say it, and end."""
    say(message)
    raise typer.Exit(code)


@contextmanager
def busy(with_what: str, line: str = "") -> Iterator[None]:
    """A sign of life, while something takes long: a spinner on a terminal, else the line, if there is one."""
    console = Console(stderr=True)
    if line and not console.is_terminal:
        say(line)
    with console.status(escape(with_what)):
        yield


def bar_of_ranks(terminal: int, shown: bool, width: int) -> Progress:
    """A bar that the first rank draws, with descriptions of that width. A rank writes into the launcher's pipe; if that
    ends in a terminal, of so many columns, the bar is drawn all the same.
    """
    console = Console(stderr=True, force_terminal=bool(terminal) or None, width=terminal or None)
    columns = (TextColumn(f"{{task.description:{width}}}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not shown, auto_refresh=False, transient=bool(terminal))
