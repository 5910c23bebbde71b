"""The figures of serve.py as tables and as a picture: `python benchmarks/h200/serve_report.py` needs no GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
DARK, PALE, GREY, FLOOR = "#1f4e79", "#9dc3e6", "#bfbfbf", "#e06c00"


def show(name: str, figures: dict[str, Any]) -> None:
    """A part of the result: figures that stand alone, then a table of the others."""
    console = Console(width=max(Console().width, 120))
    rows: dict[str, dict[str, float]] = {}
    alone = []
    for *row, column, value in _flat(figures):
        if row:
            rows.setdefault(", ".join(row), {})[column] = value
        else:
            alone.append(f"{column}: {_text(value)}")
    console.print(f"[bold]{name}[/bold]  {'; '.join(alone)}", highlight=False)
    if len(rows) == 1:  # which reads better downwards
        ((title, cells),) = rows.items()
        rows = {key: {title: value} for key, value in cells.items()}
    if rows:
        columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
        table = Table("", *columns)
        for row_name, cells in rows.items():
            table.add_row(row_name, *(_text(cells.get(column, "")) for column in columns))
        console.print(table)


def _flat(figures: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Names from the outside in, and a figure."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in _flat(value))
        else:
            yield name, value


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_speed(left, result)
    _draw_where(middle, result["where"])
    _draw_floor(right, result["narrow"])
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _draw_speed(axes: Any, result: dict[str, Any]) -> None:
    whole, parts = result["throughput"], result["parts"]
    floor = whole["tokens out"] * result["step"]["reading, TB/s"] / whole["TB that must be read"]
    bars = {
        "Echelon, no graphs": parts["without graphs, tokens/s"],
        "Echelon, one step\nat a time": parts["without ahead, tokens/s"],
        "Echelon": whole["tokens/s"],
    }
    published = whole["published"]
    names = [*bars, *published]
    speeds = [*bars.values(), *published.values()]
    axes.barh(names, speeds, color=[PALE, PALE, DARK, *(GREY for _ in published)])
    for place, speed in enumerate(speeds):
        axes.text(speed, place, f" {speed:,.0f}", va="center", fontsize=9)
    axes.axvline(floor, color=FLOOR, linestyle=":")
    axes.text(floor, len(names) - 0.4, f"reading alone: {floor:,.0f} ", ha="right", fontsize=9)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens/s (grey: published, one H200)")
    axes.set_title("Qwen3-0.6B, 256 sequences,\n100–1024 tokens in and out")


def _draw_where(axes: Any, where: dict[str, Any]) -> None:
    times = where["ms"]
    weights = where["reading weights alone, ms"]
    floors = {"attention": where["reading alone, ms"] - weights, "products": weights}
    axes.barh(list(times), list(times.values()), color=DARK)
    for place, (kind, ms) in enumerate(times.items()):
        axes.text(ms, place, f" {ms:.2f}", va="center", fontsize=9)
        if kind in floors:
            axes.vlines(floors[kind], place - 0.4, place + 0.4, color=FLOOR, linewidth=2)
    axes.plot([], [], color=FLOOR, linewidth=2, label="reading alone")
    axes.legend(frameon=False, loc="center right")
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"Where the {where['step, ms']:.1f} ms of a step go\n(256 sequences of 800 tokens)")


def _draw_floor(axes: Any, narrow: dict[str, Any]) -> None:
    batches = [name for name in narrow["bf16"] if name.startswith("batch")]
    places = np.arange(len(batches))
    for offset, (kind, color) in zip((-0.27, 0, 0.27), {"bf16": DARK, "fp8": PALE, "int8": GREY}.items(), strict=True):
        steps = [narrow[kind][batch] for batch in batches]
        axes.bar(places + offset, [each["ms"] for each in steps], 0.25, color=color, label=kind)
        floors = [each["reading alone, ms"] for each in steps]
        axes.hlines(floors, places + offset - 0.125, places + offset + 0.125, color=FLOOR, linewidth=2)
    axes.plot([], [], color=FLOOR, linewidth=2, label="reading alone")
    axes.set_xticks(places, [name.removeprefix("batch ") for name in batches])
    axes.set_xlabel("sequences of 1,024 tokens")
    axes.set_ylabel("ms")
    axes.set_title("A step of a Llama of 8B,\nby precision of its weights")
    axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/h200-serve.json", help="the result")
    parser.add_argument("--plot", type=Path, help="where to draw it")
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text())
    for name, figures in result.items():
        if isinstance(figures, dict):
            show(name, figures)
    if arguments.plot:
        draw(result, arguments.plot)
        print(f"drawn: {arguments.plot}")


if __name__ == "__main__":
    main()
