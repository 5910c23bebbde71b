"""Pictures of results: time or bandwidth over the size, both logarithmic, one line a contender."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from echelon.bench.result import Result

_FIGURES = {"latency": "latency_us", "bandwidth": "mb_per_s", "rate": "mb_per_s", "overlap": "overall_us"}
_UNITS = {"latency": "µs", "bandwidth": "MB/s", "rate": "MB/s", "overlap": "µs, computing beside"}
_COLOURS = {"mpi": "#1f6fb4", "gloo": "#e8862a", "raw": "#8a8f98"}
_OTHERS = ("#2a9d76", "#b4436c", "#6c5fc7", "#c9a227", "#3aa6b9", "#7a5c3e")
_NAMES = {"mpi": "Echelon over MPI", "gloo": "Gloo", "raw": "mpi4py alone"}


def draw(results: list[Result], path: Path) -> None:
    """Draw one picture with a panel for each result; for a non-blocking one alone, its overlap too."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#9aa0a6",
        "axes.titleweight": "bold",
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "xtick.color": "#5f6368",
        "ytick.color": "#5f6368",
        "legend.frameon": False,
    }
    with mpl.rc_context(style):
        overlap = len(results) == 1 and results[0].columns == "overlap" and results[0].sized
        panels = len(results) + overlap
        columns = min(panels, 5 if len(results) > 6 else 3)
        lines = math.ceil(panels / columns)
        size = (6.8, 4.2) if panels == 1 else (3.5 * columns, 2.9 * lines + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axis in axes[panels:]:
            axis.remove()
        for axis, result in zip(axes, results, strict=False):
            _panel(axis, result, _FIGURES[result.columns], _UNITS[result.columns])
        if overlap:
            _panel(axes[1], results[0], "overlap_percent", "% of the operation hidden")
            axes[1].set(yscale="linear", ylim=(-3, 103))
        handles = {line.get_label(): line for axis in axes[:panels] for line in axis.get_lines()}
        if len(handles) > 1:
            figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=len(handles))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def _panel(axis: Any, result: Result, key: str, unit: str) -> None:
    colours = _colours(result)
    axis.set_title(result.benchmark)
    axis.set_ylabel(unit)
    if not result.sized:
        labels = list(result.contenders)
        values = [result.series(label, key)[0] for label in labels]
        bars = axis.bar([_name(label) for label in labels], values, width=0.5, color=[colours[name] for name in labels])
        axis.bar_label(bars, fmt="%.1f", padding=2)
        return
    sizes = [row.size for row in result.rows]
    for label in result.contenders:
        values = result.series(label, key)
        axis.plot(sizes, values, color=colours[label], marker="o", markersize=3.2, linewidth=1.6, label=_name(label))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [2**power for power in range(0, 31, 5) if sizes[0] <= 2**power <= sizes[-1]] or sizes
    axis.set_xticks(ticks, [_short(size) for size in ticks])
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.minorticks_off()
    axis.grid(color="#e6e8eb", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlabel("bytes")


def _colours(result: Result) -> dict[str, str]:
    spare = iter(_OTHERS * 3)
    return {label: _COLOURS.get(label) or next(spare) for label in result.contenders}


def _name(label: str) -> str:
    return _NAMES.get(label, label)


def _short(size: int) -> str:
    for unit in ("", "K", "M", "G"):
        if size < 1024:
            return f"{size}{unit}"
        size //= 1024
    return f"{size}T"
