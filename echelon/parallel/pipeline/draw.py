"""A timeline as a picture (SVG, PNG): a row a rank, a box a computation with its microbatch, a colour a kind.

What goes up, and later chunks of a rank, are paler. Where a row is empty, the rank waits. The picture is laid out once,
as shapes; SVG and PNG are two ways to write these.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echelon.parallel.pipeline.actions import COMPUTATIONS, Action, Kind, Schedule
from echelon.parallel.pipeline.simulate import Span, Timeline

LABELS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, input",
    "backward_weight": "backward, weight",
}
COLOURS: dict[Kind, tuple[str, str]] = {  # the strong and the pale shade
    "forward": ("#2f66ad", "#b4d0f0"),
    "backward": ("#d2691e", "#fbd0a8"),
    "backward_input": ("#d2691e", "#fbd0a8"),
    "backward_weight": ("#3f8f4f", "#bfe3c4"),
}
UPDATE = "#444444"
_INK, _PALE_INK, _EMPTY, _PAPER = "#222222", "#666666", "#eeeeee", "#ffffff"
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _GAP = 880, 62, 18, 38, 28, 5
_LEAST = 7  # pixels of the smallest box: where it is less, the picture becomes wider


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    size: float = 12
    colour: str = _INK
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass(frozen=True)
class Picture:
    width: float
    height: float
    shapes: tuple[Box | Text, ...]


def svg(timeline: Timeline) -> str:
    """As the text of an SVG file, with a background of its own and a tooltip on every box."""
    drawn = picture(timeline)
    size = f'width="{drawn.width:g}" height="{drawn.height:g}" viewBox="0 0 {drawn.width:g} {drawn.height:g}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">'
    style = "<style>text { pointer-events: none }</style>"  # so that the tooltip is that of the box below
    return "\n".join([begin, style, *map(_element, drawn.shapes), "</svg>", ""])


def png(timeline: Timeline, file: Path) -> None:
    """The same into a file. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    drawn = picture(timeline)
    figure = Figure(figsize=(drawn.width / 72, drawn.height / 72), dpi=144)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.set_axis_off()
    for shape in drawn.shapes:
        if isinstance(shape, Box):
            axes.add_patch(Rectangle((shape.x, shape.y), shape.width, shape.height, color=shape.colour, linewidth=0))
        else:
            align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            words = axes.text(shape.x, shape.y, shape.text, ha=align, size=shape.size * 0.9, color=shape.colour)
            words.set_fontweight("bold" if shape.bold else "normal")
    FigureCanvasAgg(figure).print_png(str(file))


def picture(timeline: Timeline) -> Picture:
    """The timeline laid out."""
    schedule = timeline.schedule
    smallest = min(
        (s.end - s.start for row in timeline.spans for s in row if s.action.kind in COMPUTATIONS and s.end > s.start),
        default=1.0,
    )
    total = timeline.makespan or 1.0
    scale = max((_WIDTH - _LEFT - _RIGHT) / total, _LEAST / smallest)
    width, bottom = _LEFT + total * scale + _RIGHT, _TOP + schedule.ranks * (_ROW + _GAP)
    shapes: list[Box | Text] = [Box(0, 0, width, bottom + 58, _PAPER), *_heading(timeline, width)]
    for rank, spans in enumerate(timeline.spans):
        y = _TOP + rank * (_ROW + _GAP)
        shapes += [Text(_LEFT - 8, y + _ROW / 2 + 4, f"rank {rank}", anchor="end", colour=_PALE_INK)]
        shapes += [Box(_LEFT, y, total * scale, _ROW, _EMPTY)]
        for span in spans:
            shapes += _span(schedule, span, y, scale)
    return Picture(width, bottom + 58, (*shapes, *_axis(total, scale, bottom), *_legend(schedule, bottom + 44)))


def shade(schedule: Schedule, action: Action) -> tuple[str, str]:
    """The colour of a computation, and of what is written on it."""
    if schedule.is_bidirectional:
        pale = float(action.direction == "up")
    else:
        pale = action.stage // schedule.ranks / max(schedule.chunks - 1, 1)
    strong, weak = (_channels(colour) for colour in COLOURS[action.kind])
    mixed = [round(one + (other - one) * pale) for one, other in zip(strong, weak, strict=True)]
    bright = 0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2]
    return f"#{bytes(mixed).hex()}", _INK if bright > 150 else _PAPER


def kinds(schedule: Schedule) -> list[Kind]:
    """Of the computations of a schedule, in the order of a legend."""
    there = {action.kind for row in schedule.actions for action in row}
    return [kind for kind in COMPUTATIONS if kind in there]


def shape(schedule: Schedule) -> str:
    """How large it is, in words."""
    ranks = "1 rank" if schedule.ranks == 1 else f"{schedule.ranks} ranks"
    chunks = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    microbatches = "1 microbatch" if schedule.microbatches == 1 else f"{schedule.microbatches} microbatches"
    return f"{ranks}{chunks}, {microbatches}"


def about_shades(schedule: Schedule) -> str:
    """What a paler box means; nothing where all are alike."""
    if schedule.is_bidirectional:
        return "paler: up, from the last rank"
    return "paler: later chunks of a rank" if schedule.chunks > 1 else ""


def _heading(timeline: Timeline, width: float) -> Iterator[Text]:
    schedule = timeline.schedule
    yield Text(_LEFT, 24, schedule.name, size=15, bold=True)
    yield Text(
        width - _RIGHT,
        24,
        f"{shape(schedule)}: time {timeline.makespan:.4g}, bubble {timeline.bubble:.1%}",
        colour=_PALE_INK,
        anchor="end",
    )


def _span(schedule: Schedule, span: Span, y: float, scale: float) -> Iterator[Box | Text]:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    action = span.action
    title = f"{action}: {span.start:.6g} to {span.end:.6g}"
    if action.kind not in COMPUTATIONS:
        yield Box(x - 1, y - 2, max(width, 2), _ROW + 4, UPDATE, title)
        return
    if schedule.is_versioned:
        title += f", with version {action.version} of the weights"
    colour, ink = shade(schedule, action)
    yield Box(x + 0.5, y, max(width - 1, 1), _ROW, colour, title)
    number = str(action.microbatch)
    size = min(12.0, (width - 2) / (0.6 * len(number)))
    if size >= 6:
        yield Text(x + width / 2, y + _ROW / 2 + 0.36 * size, number, size=size, colour=ink, anchor="middle")


def _axis(total: float, scale: float, bottom: float) -> Iterator[Box | Text]:
    step = _nice(60 / scale)
    for number in range(int(total / step + 1e-9) + 1):
        x = _LEFT + number * step * scale
        yield Box(x - 0.5, bottom - 1, 1, 5, _PALE_INK)
        yield Text(x, bottom + 16, f"{number * step:g}", size=11, colour=_PALE_INK, anchor="middle")


def _legend(schedule: Schedule, y: float) -> Iterator[Box | Text]:
    entries = [(COLOURS[kind][0], LABELS[kind]) for kind in kinds(schedule)]
    entries += [(UPDATE, "update")] if not schedule.is_forward_only else []
    entries += [(_EMPTY, "bubble")]
    x = float(_LEFT)
    for colour, label in entries:
        wide = 4 if colour == UPDATE else 12
        yield Box(x, y - 10, wide, 12, colour)
        yield Text(x + wide + 5, y, label, size=11.5)
        x += wide + 25 + 6.2 * len(label)
    if about := about_shades(schedule):
        yield Text(x, y, about, size=11.5, colour=_PALE_INK)


def _element(shape: Box | Text) -> str:
    if isinstance(shape, Box):
        place = f'x="{shape.x:.5g}" y="{shape.y:.5g}" width="{shape.width:.5g}" height="{shape.height:.5g}"'
        inside = f"><title>{html.escape(shape.title)}</title></rect>" if shape.title else "/>"
        return f'<rect {place} fill="{shape.colour}"{inside}'
    style = f' fill="{shape.colour}"'
    style += f' font-size="{shape.size:.3g}"' if shape.size != 12 else ""
    style += f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    style += ' font-weight="bold"' if shape.bold else ""
    return f'<text x="{shape.x:.5g}" y="{shape.y:.5g}"{style}>{html.escape(shape.text)}</text>'


def _nice(least: float) -> float:
    """The least of 1, 2, 5, 10, … (and of tenths) that is not below this."""
    power = 10.0
    while power > least:
        power /= 10
    while power * 10 < least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _channels(colour: str) -> bytes:
    return bytes.fromhex(colour[1:])
