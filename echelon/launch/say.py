"""How the commands speak to the user when something is wrong."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape


def say(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[red]echelon:[/] {escape(message)}", highlight=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """Say it, and end."""
    say(message)
    raise typer.Exit(code)
