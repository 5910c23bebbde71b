"""The line that people see of a row of metrics: in plain output, and as the text of the live progress bar."""

from __future__ import annotations

from echelon.trace.units import show_bytes, show_clock, show_count, show_seconds
from echelon.train.rows import Row


def describe(row: Row, steps: int) -> str:
    """One row of a run of so many steps."""
    where = f"step {row['step']}/{steps}".ljust(len(f"step {steps}/{steps}"))
    return "  ".join([where, *_words(row, steps)])


def _words(row: Row, steps: int) -> list[str]:
    kind = row["kind"]
    if kind == "step":
        return _step(row, steps)
    if kind == "eval":
        accuracy = [f"accuracy {row['accuracy']:.1%}"] if row.get("accuracy") is not None else []
        return [f"held-out loss {_loss(row)}", *accuracy]
    if kind == "save":
        return [f"is being saved; training stood still for {show_seconds(row['stall_s'])}"]
    if kind == "start":
        begin = f"resumed from step {row['step']}" if row["step"] else "begins"
        return [f"{begin} on {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}: {row['layout']}"]
    if kind == "skip":
        return ["skipped: the gradients' norm was not finite"]
    if kind == "end":
        return [str(row.get("why", "end"))]
    return [kind]


def _step(row: Row, steps: int) -> list[str]:
    words = [f"loss {_loss(row)}", f"lr {row['lr']:.1e}"]
    if "images_s" in row:
        words.append(f"{show_count(row['images_s'])} img/s")
    else:
        words.append(f"{show_count(row['tokens_s'])} tok/s")
    words.append(f"MFU {100 * row['mfu']:.1f} %")
    words.append(show_bytes(row["memory"]))
    words.append(f"exposed {100 * row['exposed']:.1f} %")
    return [*words, f"ETA {show_clock((steps - row['step']) * row['step_s'])}"]


def _loss(row: Row) -> str:
    return "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
