"""Latency and bandwidth of Echelon beside raw mpi4py, and beside native OMB where there is one: `python
benchmarks/omb.py`.

Each repetition is a run of `echelon bench` in which Echelon (torch buffers) and mpi4py (memory of the same kind) take
turns size by size, and then, with `--omb FOLDER` (where osu_latency and osu_bw are), a run of those with the same
options and launcher. The figure is the median over the repetitions, the spread the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from echelon.bench.report import human
from echelon.launch.find import find
from echelon.launch.start import Job, command_line, rank_environment

CONTENDERS = {"mpi": "Echelon", "raw": "raw mpi4py", "omb": "native OMB"}
COLOURS = {"mpi": "#1f6fb4", "raw": "#8a8f98", "omb": "#2a9d76"}
SHOWN = [4**power for power in range(12)]
Figures = dict[str, dict[int, list[float]]]  # by contender and size, one figure a repetition


@dataclass(frozen=True)
class Measure:
    """A benchmark, the figure that is taken from it, and the options that every contender gets."""

    name: str
    key: str
    unit: str
    iterations: int
    warmup: int

    def options(self) -> list[str]:
        return ["-m", f"1:{2**22}", "-i", str(self.iterations), "-x", str(self.warmup)]


MEASURES = (Measure("latency", "latency_us", "µs", 200, 20), Measure("bw", "mb_per_s", "MB/s", 10, 2))


@dataclass(frozen=True)
class Point:
    """One size: the quartiles of each contender."""

    size: int
    low: dict[str, float]
    median: dict[str, float]
    high: dict[str, float]


def run_ours(measure: Measure, figures: Figures) -> dict[str, Any]:
    """Run `echelon bench`, add its figures, and return what it says of the machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        command = [sys.executable, "-m", "echelon.cli", "bench", measure.name, "-n", "2", *measure.options()]
        command += ["--transport", "mpi,raw", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(path.read_text())
    for row in result["rows"]:
        for contender, measured in row["figures"].items():
            figures.setdefault(contender, {}).setdefault(row["size"], []).append(measured[measure.key])
    machine: dict[str, Any] = result["machine"]
    return machine


def run_native(measure: Measure, folder: Path, figures: Figures) -> str:
    """Run OMB's own program, read it as scripts do, and return its name and version."""
    mpi = find()
    job = Job(2, [str(folder / f"osu_{measure.name}"), *measure.options()])
    environment = dict(os.environ) | rank_environment(job, mpi)
    output = subprocess.run(command_line(job, mpi), check=True, capture_output=True, text=True, env=environment).stdout
    lines = [line for line in output.splitlines() if line]
    for line in lines:
        if not line.startswith("#"):
            size, value = line.split()[:2]
            figures.setdefault("omb", {}).setdefault(int(size), []).append(float(value))
    return lines[0].lstrip("# ")


def points(figures: Figures) -> list[Point]:
    result = []
    for size in figures["mpi"]:
        quartiles = [
            {name: float(np.percentile(by_size[size], percent)) for name, by_size in figures.items()}
            for percent in (25, 50, 75)
        ]
        result.append(Point(size, *quartiles))
    return result


def table(measure: Measure, rows: list[Point]) -> Table:
    contenders = list(rows[0].median)
    result = Table(title=f"{measure.name}, {measure.unit}, median ± interquartile range", title_justify="left")
    for column in ("size", *(CONTENDERS[name] for name in contenders), "Echelon / raw"):
        result.add_column(column, justify="right")
    for row in rows:
        if row.size in SHOWN:
            cells = [f"{row.median[name]:,.2f} ± {row.high[name] - row.low[name]:,.2f}" for name in contenders]
            result.add_row(human(row.size), *cells, f"{row.median['mpi'] / row.median['raw']:.2f}")
    return result


def plot(results: dict[str, list[Point]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, len(results))
    for axis, measure in zip(axes, MEASURES, strict=True):
        rows = results[measure.name]
        sizes = [row.size for row in rows]
        for name in rows[0].median:
            low, middle, high = zip(*((row.low[name], row.median[name], row.high[name]) for row in rows), strict=True)
            axis.plot(sizes, middle, color=COLOURS[name], marker="o", markersize=3, label=CONTENDERS[name])
            axis.fill_between(sizes, low, high, color=COLOURS[name], alpha=0.2)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xticks([2**power for power in range(0, 23, 5)], ["1", "32", "1K", "32K", "1M"])
        axis.minorticks_off()
        axis.grid(color="#e6e8eb")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(f"{measure.name}, {measure.unit}", loc="left", fontweight="bold", fontsize=10.5)
        axis.set_xlabel("bytes")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--omb", type=Path, metavar="FOLDER", help="where native osu_latency and osu_bw are")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--plot", type=Path, help="where to draw it")
    arguments = parser.parse_args()
    console = Console(width=120)
    figures: dict[str, Figures] = {measure.name: {} for measure in MEASURES}
    machine: dict[str, Any] = {}
    for _ in track(range(arguments.repetitions), "measuring", console=console, transient=True):
        for measure in MEASURES:
            machine = run_ours(measure, figures[measure.name])
            if arguments.omb:
                machine["omb"] = run_native(measure, arguments.omb, figures[measure.name])
    results = {name: points(found) for name, found in figures.items()}
    for measure in MEASURES:
        console.print(table(measure, results[measure.name]))
    if arguments.json:
        result = {
            "what": "latency (µs) and bandwidth (MB/s) between two ranks: quartiles over the repetitions",
            "machine": machine,
            "repetitions": arguments.repetitions,
            "measures": [asdict(measure) for measure in MEASURES],
            "points": {name: [asdict(point) for point in rows] for name, rows in results.items()},
        }
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
