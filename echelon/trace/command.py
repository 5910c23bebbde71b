"""`echelon trace DIR`: the table on the terminal, and the same for programs and for other viewers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from echelon.comm.records import Log, read
from echelon.launch.say import fail
from echelon.trace.chrome import timeline
from echelon.trace.links import Link, read_links
from echelon.trace.summary import Line, Summary, summarise, traffic
from echelon.trace.units import show_bytes, show_seconds


def trace(
    folder: Annotated[Path, typer.Argument(help="What `echelon run --record` wrote.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    chrome: Annotated[Optional[Path], typer.Option(help="Write a timeline for Perfetto or Chrome.")] = None,
    plot: Annotated[Optional[Path], typer.Option(help="Draw the traffic into a picture (png, svg, pdf).")] = None,
) -> None:
    """Show what a job communicated, by dimension, operation and size."""
    logs = _read(folder)
    summary, links = summarise(logs), read_links(folder, traffic(logs))
    if chrome is not None:
        chrome.write_text(json.dumps(timeline(logs)))
    if plot is not None:
        _draw(logs, plot)
    if as_json:
        print(json.dumps(asdict(summary) | {"links": [asdict(link) for link in links]}, indent=1))
    elif as_csv:
        print(_csv(summary.lines), end="")
    else:
        _show(summary, links)


def _read(folder: Path) -> dict[int, Log]:
    try:
        logs = read(folder)
    except (OSError, ValueError, KeyError) as error:
        fail(f"{folder} cannot be read: {error}")
    if not logs:
        fail(f"{folder} holds no record: `echelon run --record {folder} …` writes one")
    return logs


def _draw(logs: dict[int, Log], file: Path) -> None:
    try:
        from echelon.trace.plot import draw

        draw(logs, file)
    except ModuleNotFoundError:
        fail("pictures need matplotlib: pip install 'echelon[plot]'")
    except ValueError as error:
        fail(f"{file} cannot be drawn: {error}")


def _csv(lines: list[Line]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Line)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in lines)
    return text.getvalue()


def _show(summary: Summary, links: list[Link]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    steps = f", {summary.steps} steps" if summary.steps else ""
    console.print(
        f"{summary.ranks} ranks{steps}, {show_seconds(summary.seconds)}; figures of one rank, ~ modelled as a ring"
    )
    for figures in (_BYTES | _SPEEDS | _WAITS,) if console.width >= _WIDE else (_BYTES, _SPEEDS, _WAITS):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("dimension", "operation", "size"):
            table.add_column(name, no_wrap=True)
        for name in figures:
            table.add_column(name, justify="right", no_wrap=True)
        for line in summary.lines:
            keys = line.dimension, line.operation, line.size_class
            table.add_row(*keys, *(figure(line) for figure in figures.values()))
        console.print(table)
    if links:
        _show_links(console, links)


def _show_links(console: Console, links: list[Link]) -> None:
    console.print("links of the cluster")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("node")
    for name in ("ranks", "sent", "recorded", "received"):
        table.add_column(name, justify="right")
    for link in links:
        ranks = ", ".join(map(str, link.ranks))
        table.add_row(link.node, ranks, show_bytes(link.sent), show_bytes(link.recorded), show_bytes(link.received))
    console.print(table)


def _speed(figure: float) -> str:
    return f"{show_bytes(figure)}/s" if figure else ""


def _slowest(line: Line) -> str:
    return "" if line.slowest is None else f"{line.slowest} (+{show_seconds(line.delay)})"


_WIDE = 150  # columns from which all figures stand side by side
_BYTES: dict[str, Callable[[Line], str]] = {
    "count": lambda line: f"{line.count:,.10g}",
    "payload": lambda line: show_bytes(line.payload),
    "wire": lambda line: f"{'~' if line.modelled else ''}{show_bytes(line.wire)}",
}
_SPEEDS: dict[str, Callable[[Line], str]] = {
    "time": lambda line: show_seconds(line.time),
    "algbw": lambda line: _speed(line.algbw),
    "busbw": lambda line: _speed(line.busbw),
}
_WAITS: dict[str, Callable[[Line], str]] = {
    "of step": lambda line: f"{line.share:.1%}",
    "blocked": lambda line: show_seconds(line.blocked),
    "slowest": _slowest,
}
