"""A timeline in the terminal: a line a rank, a box a computation, scaled to the width there is.

With colours as in the picture; without, the letter of the kind and the microbatch tell a box, in lower case where the
microbatch goes up: `F0F1f2` are three forwards. Where nothing stands, the rank waits.
"""

from __future__ import annotations

import itertools

from rich.text import Text

from echelon.parallel.pipeline.actions import COMPUTATIONS, Kind, Schedule
from echelon.parallel.pipeline.draw import COLOURS, LABELS, about_shades, kinds, shade
from echelon.parallel.pipeline.simulate import Span, Timeline

_LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
_LEAST = 20  # columns of the whole
_MOST = 4  # columns of the smallest box


def terminal(timeline: Timeline, width: int = 80, *, colour: bool = True) -> Text:
    """The lines of all ranks, an axis and a legend."""
    label = len(f"rank {timeline.schedule.ranks - 1}") + 2
    columns = _columns(timeline, max(width - label - 1, _LEAST))
    text = Text()
    for rank, spans in enumerate(timeline.spans):
        text.append(f"rank {rank}".ljust(label), "dim")
        cells = _cells(timeline, spans, columns)
        for span, length in cells[:-1] if cells[-1][0] is None else cells:
            text.append(*_box(timeline.schedule, span, length, colour))
        text.append("\n")
    text.append(" " * label + _axis(timeline.makespan, columns) + "\n", "dim")
    return text.append(" " * label).append_text(_legend(timeline.schedule, colour))


def _columns(timeline: Timeline, room: int) -> int:
    """For the whole time: so many that the smallest box has a whole number, if there is room for that."""
    lengths = [s.end - s.start for row in timeline.spans for s in row if s.action.kind in COMPUTATIONS]
    smallest = min((length for length in lengths if length), default=0.0)
    if not smallest:
        return room
    boxes = timeline.makespan / smallest
    return round(boxes * min(int(room / boxes), _MOST)) or room


def _cells(timeline: Timeline, spans: tuple[Span, ...], columns: int) -> list[tuple[Span | None, int]]:
    """What stands in the middle of each column, equal neighbours together."""
    computed = [span for span in spans if span.action.kind in COMPUTATIONS]
    found: list[Span | None] = []
    for column in range(columns):
        time = (column + 0.5) * timeline.makespan / columns
        while computed and computed[0].end <= time:
            computed.pop(0)
        found.append(computed[0] if computed and computed[0].start <= time else None)
    return [(span, len(list(same))) for span, same in itertools.groupby(found)]


def _box(schedule: Schedule, span: Span | None, length: int, colour: bool) -> tuple[str, str]:
    if span is None:
        return " " * length, ""
    action = span.action
    letter = _LETTERS[action.kind]
    number = str(action.microbatch)
    if colour:
        back, ink = shade(schedule, action)
        inside = number if len(number) <= length else ""
        return inside.center(length), f"{ink} on {back}"
    letter = letter.lower() if action.direction == "up" else letter
    inside = next((word for word in (letter + number, letter) if len(word) <= length), "")
    return inside.ljust(length, "─"), ""


def _axis(makespan: float, columns: int) -> str:
    """0 at one end and the makespan at the other."""
    end = f"{makespan:.4g}"
    return "0" + end.rjust(columns - 1) if len(end) < columns else ""


def _legend(schedule: Schedule, colour: bool) -> Text:
    entries = [
        Text.assemble(("  ", f"on {COLOURS[kind][0]}") if colour else _LETTERS[kind], f" {LABELS[kind]}")
        for kind in kinds(schedule)
    ]
    about = about_shades(schedule) if colour else "lower case: up, from the last rank" * schedule.is_bidirectional
    return Text("   ").join([*entries, Text(about, "dim")] if about else entries)
