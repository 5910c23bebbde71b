"""Runs side by side: the settings in which they differ, their figures, and their curves over each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echelon.trace.units import show_bytes, show_clock, show_count
from echelon.train.charts import HALF, WIDE, Point, Series, legend, line_chart, tag
from echelon.train.page import note, page, pair, section, table
from echelon.train.run_folder import Run


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings that are not the same in all, by name; empty where a run does not have one."""
    flat = [{f"{part}.{name}": of for part, told in run.config.items() for name, of in told.items()} for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    shown = {name: ["" if name not in settings else _shown(settings[name]) for settings in flat] for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1}


def figures(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What came of them; without the lines in which none has a figure."""
    made = {name: [show(run) for run in runs] for name, show in _FIGURES.items()}
    return {name: values for name, values in made.items() if any(values)}


def names_of(runs: Sequence[Run]) -> list[str]:
    """Their names; with the folder before them where two are the same."""
    names = [run.name for run in runs]
    return [str(run.folder) if names.count(run.name) > 1 else run.name for run in runs]


def write_compare(runs: Sequence[Run], file: Path) -> Path:
    """A page with the tables and the curves of all."""
    names = names_of(runs)
    title = "Runs: " + ", ".join(names)
    told, differ = figures(runs), differences(runs)
    settings = table(["setting", *names], [[name, *values] for name, values in differ.items()])
    inside = [
        tag("h1", "Runs compared"),
        legend(list(zip(names, range(len(runs)), strict=True))),
        section("Figures", table(["", *names], [[name, *values] for name, values in told.items()])),
        section("Settings that differ", settings if differ else note("All settings are the same.")),
        _curves("Loss, by step", runs, names, lambda run: run.points("loss"), "step"),
        _held_out(runs, names),
        pair(
            _curves(
                f"Loss, by {' or '.join(sorted({run.unit for run in runs}))}",
                runs,
                names,
                _by_amount,
                "seen",
                show_count,
                width=HALF,
            ),
            _curves("Loss, by time", runs, names, _by_time, "time", show_clock, width=HALF),
        ),
        _curves("Throughput, by step", runs, names, lambda run: run.points(f"{run.unit}_s"), "step", show_y=show_count),
    ]
    file.write_text(page(title, *inside))
    return file


def _curves(
    title: str,
    runs: Sequence[Run],
    names: Sequence[str],
    points: Callable[[Run], Sequence[Point]],
    x_name: str,
    show_x: Callable[[float], str] = lambda x: f"{x:,.10g}",
    show_y: Callable[[float], str] = lambda y: f"{y:.4g}",
    width: int = WIDE,
) -> str:
    series = [Series(name, points(run), number) for number, (run, name) in enumerate(zip(runs, names, strict=True))]
    series = [each for each in series if each.points]
    if not series:
        return section(title, note("No run has logged a step."))
    chart = line_chart(series, x_name=x_name, show_x=show_x, show_y=show_y, width=width)
    return section(title, chart)


def _held_out(runs: Sequence[Run], names: Sequence[str]) -> str:
    if not any(run.of("eval") for run in runs):
        return ""
    return _curves("Held-out loss, by step", runs, names, lambda run: run.points("loss", "eval"), "step")


def _by_amount(run: Run) -> list[Point]:
    """Over the tokens or images that were seen: a step has as many in all rows."""
    amounts = [row[f"{run.unit}_s"] * row["step_s"] for row in run.of("step") if row.get(f"{run.unit}_s")]
    return [(step * amounts[0], loss) for step, loss in run.points("loss")] if amounts else []


def _by_time(run: Run) -> list[Point]:
    """Over the seconds that the steps took, without evaluations and what lay between two jobs."""
    made: list[Point] = []
    seconds, before = 0.0, 0
    for row in run.of("step"):
        seconds, before = seconds + row["step_s"] * (row["step"] - before), row["step"]
        if row["loss"] is not None:
            made.append((seconds, row["loss"]))
    return made


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _figure(of: Callable[[Run], Any], show: Callable[[Any], str]) -> Callable[[Run], str]:
    return lambda run: "" if of(run) is None else show(of(run))


def _last_eval(run: Run) -> float | None:
    points = run.points("loss", "eval")
    return points[-1][1] if points else None


_FIGURES: dict[str, Callable[[Run], str]] = {
    "state": lambda run: run.state,
    "step": lambda run: f"{run.step:,}",
    "layout": lambda run: run.layout,
    "ranks": _figure(lambda run: run.ranks, str),
    "loss": _figure(lambda run: run.loss, lambda loss: f"{loss:.4f}"),
    "held-out loss": _figure(_last_eval, lambda loss: f"{loss:.4f}"),
    "tokens/s": _figure(lambda run: run.typical("tokens_s"), show_count),
    "images/s": _figure(lambda run: run.typical("images_s"), show_count),
    "MFU": _figure(lambda run: run.typical("mfu"), lambda share: f"{share:.1%}"),
    "memory": _figure(lambda run: run.last("memory"), show_bytes),
    "exposed": _figure(lambda run: run.typical("exposed"), lambda share: f"{share:.1%}"),
    "energy": _figure(lambda run: run.joules, lambda joules: f"{show_count(joules)}J"),
    "tokens or images a joule": _figure(lambda run: run.a_joule, show_count),
    "wall time": _figure(lambda run: run.seconds, show_clock),
}
