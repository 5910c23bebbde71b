"""What was measured, kept line by line so that an interrupted tuning goes on, and the table that follows from it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from echelon.comm.routes import TRANSPORTS, NoRoute, Road, Rule, Steps, Table
from echelon.tune.points import Point, Question

NOISE = 1.03  # times faster at least must a road be that another is left for


@dataclass(frozen=True, slots=True)
class Figure:
    """One road at one point: seconds of a call, the median, and the distance between the quartiles."""

    median: float
    spread: float
    samples: int

    @property
    def error(self) -> float:
        """Of the median, by the spread: 0.93 times the distance between the quartiles, over the root of the count."""
        return 0.93 * self.spread / math.sqrt(self.samples)

    def beats(self, other: Figure) -> bool:
        """Whether it is faster by more than the noise, and by more than twice the errors."""
        gap = other.median - self.median
        return gap > max((NOISE - 1) * self.median, 2 * math.hypot(self.error, other.error))


Figures = dict[Road, Figure]


class Part:
    """The measurements so far, in a file beside the table that they will become."""

    def __init__(self, table: Path, about: dict[str, Any]) -> None:
        """Go on with what is there, if it was begun in the same way."""
        self.path = table.with_name(f"{table.name}.part")
        self.figures: dict[Point, Figures] = {}
        if self.path.exists():
            self._read(about)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(about) + "\n")

    def add(self, point: Point, figures: Figures) -> None:
        self.figures[point] = figures
        with self.path.open("a") as file:
            file.write(json.dumps(_written(point, figures)) + "\n")

    def _read(self, about: dict[str, Any]) -> None:
        lines = self.path.read_text().splitlines(keepends=True)
        try:
            begun = json.loads(lines[0]) if lines else None
        except ValueError:
            begun = None
        if begun != json.loads(json.dumps(about)):
            raise NoRoute(
                f"{self.path} holds a tuning that was begun with other options, or on another machine: "
                "finish it with those, remove it, or write to another file (-o)"
            )
        whole = [line for line in lines[1:] if line.endswith("\n")]  # the last one may have been cut off
        self.figures = dict(_read(json.loads(line)) for line in whole)
        self.path.write_text("".join(lines[:1] + whole))


def table_of(figures: dict[Point, Figures], about: dict[str, Any]) -> Table:
    by_question: dict[Question, dict[int, Figures]] = defaultdict(dict)
    for point, measured in figures.items():
        by_question[point.question][point.size] = measured
    rules = tuple(
        Rule(q.operation, q.ranks, q.nodes, steps_of(measured) if q.sized else _one_road(measured), q.device, q.low)
        for q, measured in by_question.items()
    )
    measured_points = [_written(point, measured) for point, measured in figures.items()]
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    return Table(rules, about={"date": date, **about, "measured": measured_points})


def figures_of(table: Table) -> dict[Point, Figures]:
    """What a table was made of; nothing for one that was written by hand."""
    return dict(_read(entry) for entry in table.about.get("measured", []))


def steps_of(measured: dict[int, Figures]) -> Steps:
    """The library alone, until another road is faster beyond doubt, and no slower at the next size; then that one,
    until the next is. Between two sizes that were measured the road changes half way.
    """
    sizes = sorted(measured)
    steps: list[tuple[int, Road]] = []
    for size, before, after in zip(sizes, [0, *sizes], [*sizes[1:], sizes[-1]], strict=False):
        figures, next_figures = measured[size], measured[after]
        alone = next((road for road in map(Road, TRANSPORTS) if road in figures), None)
        last = steps[-1][1] if steps else alone
        faster = [
            road
            for road in figures
            if last is None
            or last not in figures
            or (figures[road].beats(figures[last]) and _holds(road, last, next_figures))
        ]
        chosen = min(faster, key=lambda road: figures[road].median, default=last)
        assert chosen is not None
        if not steps or chosen != steps[-1][1]:
            steps.append((math.isqrt(before * size - 1) + 1 if steps else 0, chosen))
    return tuple(steps)


def _holds(road: Road, last: Road, figures: Figures) -> bool:
    """Whether what was faster at one size is no slower at the next."""
    return last not in figures or (road in figures and figures[road].median <= figures[last].median)


def _one_road(measured: dict[int, Figures]) -> Steps:
    """The best over all sizes, each of which counts as much."""
    times: dict[Road, float] = defaultdict(float)
    for figures in measured.values():
        least = min(figure.median for figure in figures.values())
        for road, figure in figures.items():
            times[road] += math.log(figure.median / least)
    complete = [road for road in times if all(road in figures for figures in measured.values())]
    return ((0, min(complete, key=lambda road: times[road])),)


def _written(point: Point, figures: Figures) -> dict[str, Any]:
    roads = {str(road): [figure.median, figure.spread, figure.samples] for road, figure in figures.items()}
    return point.to_data() | {"seconds": roads}


def _read(data: dict[str, Any]) -> tuple[Point, Figures]:
    figures = {Road.parse(name): Figure(*numbers) for name, numbers in data["seconds"].items()}
    return Point.from_data(data), figures
