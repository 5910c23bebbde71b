"""Who wins where: a table of routes, drawn in the terminal, a line for each operation and a column for each size."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from echelon.comm.routes import TRANSPORTS, Road, Rule, Table
from echelon.tune.points import LOW_DTYPE, Point, Question
from echelon.tune.result import Figures, figures_of

_COLOURS = {"": "default", "exchange": "cyan", "ring": "yellow", "two-level": "magenta", "shared": "green"}
_LETTERS = {"": "", "exchange": "x", "ring": "r", "two-level": "2", "shared": "s"}


def show(table: Table, console: Console) -> None:
    """With how many times faster the best choice is than MPI (or Gloo) alone, if the table tells what was measured."""
    machine = table.about.get("machine", {})
    if machine:
        links = f", {machine['links']} between nodes" if machine.get("links") else ""
        what = f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('mpi')}{links}"
        console.print(escape(f"{what}, measured {table.about.get('date', '')}"), highlight=False)
    measured = figures_of(table)
    by_shape: dict[str, list[Rule]] = defaultdict(list)
    for rule in table.rules:
        by_shape[f"{rule.ranks} ranks on {rule.nodes} node{'s'[: rule.nodes > 1]}, {rule.device}"].append(rule)
    for shape, rules in by_shape.items():
        sized = [rule for rule in rules if _question(rule).sized]
        console.print()
        console.print(_grid(shape, sized, measured) if sized else f"[bold]{shape}[/]")
        if single := [f"{rule.operation} {rule.steps[0][1]}" for rule in rules if rule not in sized]:
            console.print(escape(f"whatever the size: {', '.join(single)}"), highlight=False)
    roads = dict.fromkeys(road for rule in table.rules for _, road in rule.steps)
    console.print()
    console.print(", ".join(f"{_letters(road)} {road}" for road in roads), highlight=False)


def _grid(title: str, rules: list[Rule], measured: dict[Point, Figures]) -> Grid:
    points: dict[tuple[Rule, int], Figures] = {}
    for rule in rules:
        mine = {(rule, point.size): found for point, found in measured.items() if point.question == _question(rule)}
        points |= mine
    sizes = sorted({size for _, size in points} or {start for rule in rules for start, _ in rule.steps})
    grid = Grid(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    grid.add_column("", no_wrap=True)
    for size in sizes:
        grid.add_column(_bytes(size), justify="right", no_wrap=True)
    grid.add_column("gain", justify="right", no_wrap=True)
    for rule in rules:
        name = f"{rule.operation}{f' {LOW_DTYPE}' if rule.low else ''}"
        gains = [_gain(rule, size, points[rule, size]) for size in sizes if (rule, size) in points]
        cells = (_cell(rule, size) if (rule, size) in points or not points else "" for size in sizes)
        grid.add_row(name, *cells, f"{max(gains):.1f}×" if gains else "")
    return grid


def _question(rule: Rule) -> Question:
    return Question(rule.operation, rule.ranks, rule.nodes, rule.device, rule.low)


def _road(rule: Rule, size: int) -> Road:
    return [road for start, road in rule.steps if start <= size][-1]


def _cell(rule: Rule, size: int) -> str:
    road = _road(rule, size)
    return f"[{_COLOURS[road.algorithm]}]{_letters(road)}[/]"


def _gain(rule: Rule, size: int, figures: Figures) -> float:
    """How many times faster the choice is than the first transport, alone."""
    alone = next((figures[road] for road in map(Road, TRANSPORTS) if road in figures), None)
    chosen = figures.get(_road(rule, size))
    return 1.0 if chosen is None or alone is None else alone.median / chosen.median


def _letters(road: Road) -> str:
    return road.transport[0].upper() + _LETTERS[road.algorithm]


def _bytes(size: int) -> str:
    for unit in ("", "K", "M"):
        if size < 1024 or unit == "M":
            return f"{size}{unit}"
        size //= 1024
    return str(size)
