"""The one report of `echelon bench all`: Markdown with a table and a picture for every benchmark."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from echelon.bench.result import Result
from echelon.bench.table import COLUMNS

NAME = "report.md"
_SHOWN = {
    "latency": ("latency_us",),
    "bandwidth": ("mb_per_s",),
    "rate": ("mb_per_s", "messages_per_s"),
    "overlap": ("overall_us", "pure_us", "overlap_percent"),
}


def write(results: list[Result], left_out: dict[str, str], folder: Path) -> Path:
    """Write the report, and its pictures where matplotlib is installed, beside the results."""
    pictures = importlib.util.find_spec("matplotlib") is not None
    if pictures:
        from echelon.bench.plot import draw

        draw([result for result in results if result.sized], folder / "overview.png")
        for result in results:
            draw([result], folder / f"{result.benchmark}.png")
    path = folder / NAME
    path.write_text("\n".join(_lines(results, left_out, pictures)) + "\n")
    return path


def human(size: int) -> str:
    """1024 is 1 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or size % 1024 or unit == "GiB":
            return f"{size} {unit}"
        size //= 1024
    raise AssertionError


def _lines(results: list[Result], left_out: dict[str, str], pictures: bool) -> Iterator[str]:
    machine = results[0].machine
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    yield "# Micro-benchmarks"
    yield ""
    yield (
        f"{machine['ranks']} ranks, {machine['cores']} cores ({machine['machine']}){gpu}; {machine['mpi']}; "
        f"torch {machine['torch']}. Each result is beside this page as JSON."
    )
    yield ""
    labels = {label: words for result in results for label, words in result.contenders.items()}
    yield from (f"- `{label}`: {words}" for label, words in labels.items())
    failures = [result for result in results if result.failure]
    if failures:
        yield ""
        yield "**Failed validation:**"
        yield ""
        yield from (f"- {result.failure}" for result in failures)
    if pictures:
        yield ""
        yield "![all of them, over the size](overview.png)"
    else:
        yield ""
        yield "There are no pictures: `pip install matplotlib`."
    for result in results:
        yield ""
        yield from _section(result, pictures)
    if left_out:
        yield ""
        yield "## Not run"
        yield ""
        yield from (f"- {name}: {reason}" for name, reason in left_out.items())


def _section(result: Result, pictures: bool) -> Iterator[str]:
    columns = [column for column in COLUMNS[result.columns] if column.key in _SHOWN[result.columns]]
    cells = [(label, column) for label in result.contenders for column in columns]
    yield f"## {result.benchmark}"
    yield ""
    yield f"{result.title}. {'' if result.sized else 'It has no size.'}".rstrip()
    yield ""
    yield "| size | " + " | ".join(f"{label} {column.short}" for label, column in cells) + " |"
    yield "| ---: |" + " ---: |" * len(cells)
    for row in result.rows:
        figures = " | ".join(f"{row.figures[label][column.key]:,.2f}" for label, column in cells)
        yield f"| {human(row.size) if row.size else ''} | {figures} |"
    if pictures:
        yield ""
        yield f"![{result.benchmark}]({result.benchmark}.png)"
