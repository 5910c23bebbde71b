"""`report.html` of a run: one file that shows what was trained, how fast, and where the time and the memory went.

It is made of what the run's folder holds. A run that was killed, or that has no record, no evaluation and a single
row, still has a report, which says what is missing.
"""

from __future__ import annotations

import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

from echelon.trace.units import show_bytes, show_clock, show_count, show_seconds
from echelon.train.charts import HALF, Bar, Series, bar_chart, legend, line_chart, tag, text
from echelon.train.page import note, page, pair, section, table, tiles
from echelon.train.report_record import communication, one_step, read_logs
from echelon.train.run_folder import Run, open_run

FILE = "report.html"
_KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "host": "optimizer, on host"}


def write_report(folder: Path) -> Path:
    """Make the report anew; returns where it is."""
    run = open_run(folder)
    logs, problem = read_logs(folder / "record")
    inside = [
        _header(run),
        _loss(run),
        pair(_speed(run), _exposed(run)),
        pair(_rate(run), _norm(run)),
        _memory(run),
        communication(logs, problem),
        one_step(logs),
        _checkpoints(run),
        _config(run),
    ]
    file = folder / FILE
    new = file.with_suffix(".new")
    new.write_text(page(f"{run.name}: {run.model}", *inside))
    return new.replace(file)


def _header(run: Run) -> str:
    began = datetime.fromtimestamp(run.when).strftime("%Y-%m-%d %H:%M") if run.when else "unknown"
    where = "".join(f"{part}; " for part in (run.model, run.start.get("device")) if part)
    lead = f"{where}began {began}; {run.state} at step {run.step:,}{f' of {run.steps:,}' if run.steps else ''}"
    figures = {
        "parameters": _shown(run.start.get("parameters"), show_count),
        "ranks": _shown(run.ranks, str),
        "wall time": _shown(run.seconds, show_clock),
        "last loss": _shown(run.loss, lambda loss: f"{loss:.4f}"),
        "held-out loss": _shown(_last(run, "loss"), lambda loss: f"{loss:.4f}"),
        "held-out accuracy": _shown(_last(run, "accuracy"), lambda share: f"{share:.1%}"),
        f"{run.unit}/s": _shown(run.speed, show_count),
        "MFU": _shown(run.typical("mfu"), lambda share: f"{share:.1%}"),
        "energy": _shown(run.joules, lambda joules: f"{show_count(joules)}J"),
        f"{run.unit} a joule": _shown(run.a_joule, show_count),
    }
    known = {name: figure for name, figure in figures.items() if figure}
    layout = section("Layout", tag("pre", text(run.start["drawing"]))) if "drawing" in run.start else ""
    missing = "" if run.rows else note("There are no metrics yet.")
    told = run.start.get("energy")
    energy = note(f"Energy: {', '.join(told)}.") if told else note("This machine does not tell its energy.")
    return tag("h1", text(run.name)) + tag("p", text(lead), class_="lead") + tiles(known) + missing + energy + layout


def _loss(run: Run) -> str:
    series = [Series("training", run.points("loss"), 0), Series("held out", run.points("loss", "eval"), 1, dots=True)]
    series = [each for each in series if each.points]
    if not series:
        return section("Loss", note("No step has been logged with a loss."))
    resumed = [(row["step"], f"resumed on {row.get('ranks', '?')} ranks") for row in run.of("start")[1:] if row["step"]]
    begin, end = (pick(step for each in series for step, _ in each.points) for pick in (min, max))
    marks = [(step, words) for step, words in resumed if begin <= step <= end]
    skipped = run.of("skip")
    remarks = [] if run.of("eval") else ["There was no evaluation on held-out samples."]
    remarks += [f"{len(skipped)} steps were skipped: their gradients were not finite."] if skipped else []
    chart = line_chart(series, marks=marks)
    return section("Loss", legend([(each.name, each.colour) for each in series]), chart, *map(note, remarks))


def _speed(run: Run) -> str:
    points = run.points(f"{run.unit}_s")
    if not points:
        return section("Throughput", note("No step has been logged."))
    share = run.typical("mfu")
    told = f"Median {show_count(run.speed or 0)} {run.unit}/s" + (f", MFU {share:.1%}" if share is not None else "")
    return section(
        "Throughput",
        note(f"{told}."),
        line_chart([Series(f"{run.unit}/s", points, 2)], show_y=show_count, from_zero=True, width=HALF),
    )


def _exposed(run: Run) -> str:
    points = run.points("exposed")
    title = "Communication that was not overlapped"
    if not points:
        return section(title, note("No step has been logged."))
    told = f"Median {run.typical('exposed') or 0:.1%} of a rank's time, blocked."
    chart = line_chart(
        [Series("exposed", points, 4)], show_y=lambda share: f"{100 * share:.3g} %", from_zero=True, width=HALF
    )
    return section(title, note(told), chart)


def _rate(run: Run) -> str:
    points = run.points("lr")
    if not points:
        return section("Learning rate", note("No step has been logged."))
    return section(
        "Learning rate",
        line_chart([Series("learning rate", points, 3)], show_y=lambda y: f"{y:.3g}", from_zero=True, width=HALF),
    )


def _norm(run: Run) -> str:
    points = run.points("norm")
    if not points:
        return section("Norm of the gradients", note("No step has been logged."))
    return section("Norm of the gradients", line_chart([Series("norm", points, 5)], from_zero=True, width=HALF))


def _memory(run: Run) -> str:
    told = run.memory()
    if told is None:
        return section("Memory of a rank", note("It was not measured: memory.json is missing."))
    bars, kinds = [], ["rest"]
    drawn = list(_KINDS) if str(run.start.get("device")).startswith("CPU") else [*_KINDS, "rest"]
    for which, figures in told.items():
        label = {"largest": "largest of ranks"}.get(which, which)
        for how in ("predicted", "measured"):
            if figures.get(how):
                held = {kind: figures[how].get(kind, 0) for kind in drawn}
                kinds += [kind for kind, size in held.items() if size]
                parts = [(_kind(kind), float(size), _place(kind)) for kind, size in held.items() if size]
                bars.append(Bar(f"{label}, {how}", parts))
    names = [(_kind(kind), _place(kind)) for kind in drawn if kind in kinds]
    lines = [_memory_line(kind, told.get("rank 0", {})) for kind in (*_KINDS, "rest") if kind in kinds]
    remark = (
        "Measured between a backward pass and the step. The rest is the peak without the other kinds: beside "
        "activations, which alone are predicted, a process on a CPU has Python and its libraries in it."
    )
    rows = table(["rank 0", "predicted", "measured", "difference"], lines)
    return section("Memory of a rank, by kind", legend(names), bar_chart(bars, show_bytes), rows, note(remark))


def _memory_line(kind: str, figures: dict[str, Any]) -> list[str]:
    predicted, measured = ((figures.get(how) or {}).get(kind) for how in ("predicted", "measured"))
    apart = f"{measured / predicted - 1:+.1%}" if predicted and measured and kind != "rest" else ""
    return [_kind(kind), _shown(predicted, show_bytes), _shown(measured, show_bytes), apart]


def _checkpoints(run: Run) -> str:
    saves = run.of("save")
    if not saves:
        return section("Checkpoints", note("None was saved."))
    stalls = [row["stall_s"] for row in saves]
    shares = [row["stall_s"] / row["interval_s"] for row in saves if row.get("interval_s")]
    told = f"{len(saves)} saved; training stood still for {show_seconds(statistics.mean(stalls))} a time"
    told += f", {statistics.mean(shares):.2%} of the time between two." if shares else "."
    lines = [
        [f"{row['step']:,}", show_seconds(row["stall_s"]), _shown(row.get("interval_s"), show_seconds)]
        for row in saves[-10:]
    ]
    return section("Checkpoints", note(told), table(["step", "stood still", "since the one before"], lines))


def _config(run: Run) -> str:
    file = run.folder / "config.toml"
    if not file.exists():
        return section("Config", note("config.toml is missing."))
    return section(
        "Config", tag("details", tag("summary", "all settings, as resolved"), tag("pre", text(file.read_text())))
    )


def _last(run: Run, name: str) -> float | None:
    points = run.points(name, "eval")
    return points[-1][1] if points else None


def _shown(value: Any, show: Any) -> str:
    return "" if value is None else str(show(value))


def _kind(kind: str) -> str:
    return _KINDS.get(kind, "activations and the rest")


def _place(kind: str) -> int:
    return {"parameters": 0, "gradients": 1, "optimizer": 2, "host": 3}.get(kind, 7)
