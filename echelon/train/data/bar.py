"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextlib.contextmanager
def bar(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Of so many bytes; gives the function to be told how many more are done."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task(text, total=total)
        yield lambda more: progress.update(task, advance=more)
