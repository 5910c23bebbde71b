"""Charts as SVG inside a page: no library, no script, and a tooltip on every mark.

Colours are variables of the page's style (`--c0`, `--c1`, …), so that a chart follows its reader from light to dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COLOURS = 8
WIDE, HALF = 1060, 500  # as wide as a page's section, and as one of two side by side
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
_MOST = 600  # points of a curve that are drawn

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A curve. `dots` marks each point, for curves of few."""

    name: str
    points: Sequence[Point]
    colour: int
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """A row of a chart of bars: its parts, one after the other, as (name, length, colour)."""

    label: str
    parts: Sequence[tuple[str, float, int]]


@dataclass(frozen=True)
class Span:
    """A mark in a lane of a timeline. In its last `solid` seconds it is solid, before that pale."""

    lane: int
    begin: float
    end: float
    solid: float
    colour: int
    title: str


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element. What is inside is markup already; `text` makes some of a text."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_short(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{''.join(inside)}</{name}>"


def text(value: object) -> str:
    return html.escape(str(value))


def colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"


def legend(names: Sequence[tuple[str, int]]) -> str:
    entries = [tag("span", tag("i", style=f"background:{colour(number)}"), text(name)) for name, number in names]
    return tag("p", *entries, class_="legend")


def line_chart(
    series: Sequence[Series],
    *,
    x_name: str = "step",
    show_x: Callable[[float], str] = lambda x: f"{x:,.10g}",
    show_y: Callable[[float], str] = lambda y: f"{y:.4g}",
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    width: int = WIDE,
) -> str:
    """Curves over a common x. `marks` are moments, with what happened there."""
    bottom, right = (290 if width == WIDE else 210) - _BOTTOM, width - _RIGHT
    points = [point for each in series for point in each.points]
    low, high = _range([y for _, y in points], from_zero)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    across, up = _scale(first, last, _LEFT, right), _scale(low, high, bottom, _TOP)
    parts = [_grid_line(up(y), right, show_y(y)) for y in ticks(low, high, 5)]
    for x in ticks(first, last, 12 if width == WIDE else 6):
        parts.append(_label(across(x), bottom + 16, show_x(x), "middle"))
    parts.append(_label(right, bottom + 31, x_name, "end"))
    for x, happened in marks:
        line = tag("line", tag("title", text(happened)), x1=across(x), x2=across(x), y1=_TOP, y2=bottom)
        parts.append(tag("g", line, _label(across(x) + 4, _TOP + 9, happened, "start"), class_="mark"))
    for each in series:
        drawn = thin(each.points)
        path = " ".join(f"{_short(across(x))},{_short(up(y))}" for x, y in drawn)
        parts.append(tag("polyline", points=path, fill="none", stroke=colour(each.colour), stroke_width=1.8))
        for x, y in drawn:
            title = tag("title", text(f"{each.name}, {x_name} {show_x(x)}: {show_y(y)}"))
            kind = "dot" if each.dots or len(drawn) == 1 else "hover"
            parts.append(tag("circle", title, cx=across(x), cy=up(y), r=3.2, fill=colour(each.colour), class_=kind))
    return _svg(width, bottom + _BOTTOM, parts)


def bar_chart(bars: Sequence[Bar], show: Callable[[float], str]) -> str:
    """Rows of bars, to the right."""
    left, thick, gap = 190, 20, 9
    longest = max((sum(length for _, length, _ in bar.parts) for bar in bars), default=0) or 1
    along = _scale(0, longest, left, WIDE - 110)
    parts, y = [], 4
    for bar in bars:
        parts.append(_label(left - 8, y + thick * 0.7, bar.label, "end"))
        begin = 0.0
        for name, length, number in bar.parts:
            title = tag("title", text(f"{bar.label}, {name}: {show(length)}"))
            width = max(along(begin + length) - along(begin), 0.5)
            parts.append(tag("rect", title, x=along(begin), y=y, width=width, height=thick, fill=colour(number)))
            begin += length
        parts.append(_label(along(begin) + 6, y + thick * 0.7, show(begin), "start"))
        y += thick + gap
    return _svg(WIDE, y, parts)


def timeline(lanes: Sequence[str], spans: Sequence[Span], seconds: float, show_x: Callable[[float], str]) -> str:
    """What happened when, a lane a row; where nothing is drawn in a lane, nothing happened there."""
    left, thick, gap = 110, 16, 6
    along = _scale(0, seconds, left, WIDE - _RIGHT)
    bottom = len(lanes) * (thick + gap) + 4
    parts = []
    for x in ticks(0, seconds, 8):
        parts.append(tag("line", x1=along(x), x2=along(x), y1=0, y2=bottom, class_="grid"))
        parts.append(_label(along(x), bottom + 14, show_x(x), "middle"))
    for number, name in enumerate(lanes):
        y = number * (thick + gap) + 4
        parts.append(tag("rect", x=left, y=y, width=WIDE - _RIGHT - left, height=thick, class_="lane"))
        parts.append(_label(left - 8, y + thick * 0.75, name, "end"))
    for span in spans:
        y, split = span.lane * (thick + gap) + 4, max(span.begin, span.end - span.solid)
        pieces = []
        for begin, end, opacity in ((span.begin, split, 0.4), (split, span.end, 1)):
            if end > begin:
                width = max(along(end) - along(begin), 0.7)
                pieces.append(tag("rect", x=along(begin), y=y, width=width, height=thick, opacity=opacity))
        parts.append(tag("g", tag("title", text(span.title)), *pieces, fill=colour(span.colour), class_="span"))
    return _svg(WIDE, bottom + 20, parts)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two, so many or fewer."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point]) -> list[Point]:
    """Not more points than a screen shows, with the first and the last."""
    if len(points) <= _MOST:
        return list(points)
    stride = -(-len(points) // _MOST)
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        low = min(low, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low if from_zero and low == 0 else low - room, high + room


def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    if high == low:
        return lambda value: (begin + end) / 2
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def _grid_line(y: float, right: float, name: str) -> str:
    line = tag("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid")
    return line + _label(_LEFT - 8, y + 4, name, "end")


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return tag("text", text(words), x=x, y=y, text_anchor=anchor)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return tag("svg", *parts, viewBox=f"0 0 {width} {_short(height)}", role="img")


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
