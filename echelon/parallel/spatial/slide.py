"""How a window slides over tiles: what outputs see of their own tile, and what of others'.

Along each axis the outputs of a tile are three: the first, whose windows begin before it, those whose windows see
nothing else, and the last. The inner ones are computed while borders travel, from the tile as it is: so neither it nor
its padding is copied, or kept twice for the backward pass. What the others see is fetched (exchange.py), and what lies
beyond the image is padded by hand.

Where both axes are cut, columns come first; then rows of all columns that are seen here, of others' ones, too, so that
nobody asks a neighbour across the corner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.spatial.cut import Window, beyond, bounds, rows, within
from echelon.parallel.spatial.exchange import arrived, began
from echelon.parallel.spatial.tiles import AXES, Tile, Whole, plain

Compute = Callable[[Tensor, tuple[range, range], list[int]], Tensor]
HEIGHT, WIDTH = AXES


@dataclass(frozen=True)
class _Axis:
    """One axis of a tile, of its outputs and of what they see."""

    window: Window
    length: int
    group: dist.ProcessGroup | None
    own: range  # rows of this tile
    outputs: range
    first: range  # these three are the outputs
    inner: range
    last: range
    wanted: tuple[tuple[range, ...], ...]  # what the first and the last outputs of each tile see

    @property
    def is_exchanged(self) -> bool:
        """Whether anybody wants anything."""
        return self.group is not None and any(rows(each) for each in self.wanted)

    @property
    def here(self) -> tuple[range, ...]:
        return self.wanted[0 if self.group is None else self.group.rank()]

    def sees(self, outputs: range) -> range:
        """Of the image."""
        return within(self.window.sees(outputs), self.length)

    def padding(self, outputs: range) -> tuple[int, int]:
        return beyond(self.window.sees(outputs), self.length)


def slide(
    x: Tile, windows: tuple[Window, Window], fill: float, channels: int, compute: Compute, *needed: Tensor | None
) -> Tile:
    """Let windows slide: `compute` has what they see, of which outputs that is, and padding that is left to it."""
    whole = x.whole.resized(*(window.outputs(size) for window, size in zip(windows, x.whole.sizes, strict=True)))
    over = _over_one if None in x.whole.ground.groups else _over_both
    local, out = over(x, whole, windows, fill, compute)
    return Tile.of(nothing(local, channels, whole.here, *needed) if out is None else out, whole)


def nothing(x: Tensor, channels: int, parts: tuple[range, range], *needed: Tensor | None) -> Tensor:
    """Where no output is: so that who holds none takes part in the backward pass."""
    out = x.new_zeros(len(x), channels, *(len(part) for part in parts))
    for each in (x, *needed):
        if each is not None:
            out = out + each.flatten()[:0].sum()
    return out


def _over_one(
    x: Tile, whole: Whole, windows: tuple[Window, Window], fill: float, compute: Compute
) -> tuple[Tensor, Tensor | None]:
    """One axis is cut, or none. The tile, which has a part in what others do, and its outputs, if there are any."""
    which = 1 if x.whole.ground.groups[1] is not None else 0
    axis, dim, parts = _axis(x.whole, whole, windows, which), AXES[which], whole.here
    local, pads, padding = _across(plain(x), x.whole, whole, windows, 1 - which)
    journey = None
    if axis.group is not None and axis.is_exchanged and parts[1 - which]:
        local, token, journey = began(local, dim, axis.length, axis.wanted, axis.group)
    if not all(parts):
        if journey is not None:
            journey.receive()
        return local, None

    def computed(seen: Tensor, outputs: range) -> Tensor:
        ends = axis.padding(outputs)
        by_hand = [*pads, *ends] if which == 0 else [*ends, *pads]
        of = (outputs, parts[1]) if which == 0 else (parts[0], outputs)
        return compute(_padded(seen, by_hand, fill), of, padding)

    found = {}
    if axis.inner:
        found[axis.inner] = computed(_narrowed(local, dim, axis.sees(axis.inner), axis.own.start), axis.inner)
    if axis.first or axis.last:
        if journey is not None:
            slabs = arrived(token, journey)
        else:  # all of it is here, or none is anywhere
            slabs = tuple(local.narrow(dim, min(each.start, len(axis.own)), len(each)) for each in axis.here)
        for outputs, slab in zip((axis.first, axis.last), slabs, strict=True):
            if outputs:
                found[outputs] = computed(slab, outputs)
    elif journey is not None:
        journey.receive()  # nothing, but what was sent has to arrive
    return local, _together([found[each] for each in (axis.first, axis.inner, axis.last) if each], dim)


def _over_both(
    x: Tile, whole: Whole, windows: tuple[Window, Window], fill: float, compute: Compute
) -> tuple[Tensor, Tensor | None]:
    """The same, where both axes are cut."""
    high, wide = (_axis(x.whole, whole, windows, which) for which in range(2))
    local, sides = _with_sides(plain(x), high, wide)
    seen = wide.sees(wide.outputs)
    own, before, after = _apart(seen, wide.own)
    local = _narrowed(local, WIDTH, own, wide.own.start)
    beside = _columns(sides, wide.here, before), _columns(sides, wide.here, after)
    journey = None
    if high.group is not None and high.is_exchanged and wide.outputs:
        local, token, journey = began(local, HEIGHT, high.length, high.wanted, high.group, beside)
    if not (high.outputs and wide.outputs):
        if journey is not None:
            journey.receive()
        return local, None

    def computed(seen: Tensor, of: tuple[range, range]) -> Tensor:
        return compute(_padded(seen, [*wide.padding(of[1]), *high.padding(of[0])], fill), of, [0, 0])

    found = {}
    if high.inner:
        found[high.inner] = _middle(high, wide, (sides[0], local, sides[1]), own, computed)
    if high.first or high.last:
        if journey is not None:
            slabs = arrived(token, journey)
        else:  # they see nothing but padding
            band = torch.cat([beside[0], local, beside[1]], WIDTH)
            slabs = tuple(band.narrow(HEIGHT, 0, 0) for _ in high.here)
        for outputs, slab in zip((high.first, high.last), slabs, strict=True):
            if outputs:
                found[outputs] = computed(slab, (outputs, wide.outputs))
    elif journey is not None:
        journey.receive()  # nothing, but what was sent has to arrive, and what is learned about it to come back
        if not wide.inner:
            found[high.inner] = found[high.inner] + token.sum()
    return local, _together([found[each] for each in (high.first, high.inner, high.last) if each], HEIGHT)


def _middle(
    high: _Axis, wide: _Axis, places: tuple[Tensor, ...], own: range, computed: Callable[..., Tensor]
) -> Tensor:
    """The outputs that need no rows of others: of the columns before, of the tile itself, and of those after."""
    starts, line = (wide.here[0].start, own.start, wide.here[1].start), []
    for outputs, place, start in zip((wide.first, wide.inner, wide.last), places, starts, strict=True):
        if outputs:
            part = _narrowed(place, HEIGHT, high.sees(high.inner), high.own.start)
            line.append(computed(_narrowed(part, WIDTH, wide.sees(outputs), start), (high.inner, outputs)))
    return _together(line, WIDTH)


def _with_sides(local: Tensor, high: _Axis, wide: _Axis) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tile, and the columns that its first and its last outputs see; or that rows need which are for others."""
    if not wide.is_exchanged:
        return local, tuple(local.narrow(WIDTH, 0, 0) for _ in wide.here)
    if wide.group is not None and high.own and (high.outputs or high.is_exchanged):
        local, token, journey = began(local, WIDTH, wide.length, wide.wanted, wide.group)
        return local, arrived(token, journey)
    return local, tuple(local.new_empty(*local.shape[:WIDTH], len(each)) for each in wide.here)  # nobody looks at them


def _axis(of: Whole, whole: Whole, windows: tuple[Window, Window], which: int) -> _Axis:
    window, length, group = windows[which], of.sizes[which], of.ground.groups[which]
    tiles, me = (1, 0) if group is None else (group.size(), group.rank())
    held, outputs = bounds(length, tiles), bounds(whole.sizes[which], tiles)
    pieces = [_pieces(window, *each) for each in zip(outputs, held, strict=True)]
    wanted = tuple((within(window.sees(first), length), within(window.sees(last), length)) for first, _, last in pieces)
    if None not in of.ground.groups and which == 1:
        seen = [within(window.sees(each), length) for each in outputs]
        wanted = tuple(_reaching(*each) for each in zip(wanted, seen, held, strict=True))
    return _Axis(window, length, group, held[me], outputs[me], *pieces[me], wanted)


def _pieces(window: Window, part: range, held: range) -> tuple[range, range, range]:
    """Of a tile's outputs: the first, those whose windows see nothing but this tile, and the last."""
    reach = window.dilation * (window.kernel - 1)
    low = -(-(held.start + window.before) // window.stride)
    high = (held.stop - 1 - reach + window.before) // window.stride + 1
    low = min(max(low, part.start), part.stop)
    high = min(max(high, low), part.stop)
    return range(part.start, low), range(low, high), range(high, part.stop)


def _reaching(wanted: tuple[range, range], seen: range, own: range) -> tuple[range, range]:
    """What the first and the last outputs see, and what lies between that and the tile: all that is beside it of rows
    which reach from the first column that is seen to the last.
    """
    first, last = wanted
    if first:
        first = range(first.start, max(first.stop, min(seen.stop, own.start)))
    if last:
        last = range(min(last.start, max(seen.start, own.stop)), last.stop)
    return first, last


def _apart(seen: range, own: range) -> tuple[range, range, range]:
    """Of what is seen: that which is the tile's own, what lies before it, and what after it."""
    low = min(max(seen.start, own.start), own.stop)
    high = max(min(seen.stop, own.stop), low)
    before = range(seen.start, max(min(seen.stop, own.start), seen.start))
    return range(low, high), before, range(min(max(seen.start, own.stop), seen.stop), seen.stop)


def _columns(sides: tuple[Tensor, ...], have: tuple[range, ...], columns: range) -> Tensor:
    """Some of those that came, by the first or with the last."""
    for side, has in zip(sides, have, strict=True):
        if has.start <= columns.start and columns.stop <= has.stop:
            return side.narrow(WIDTH, columns.start - has.start, len(columns))
    return sides[0].narrow(WIDTH, 0, 0)  # there are none


def _across(
    local: Tensor, of: Whole, whole: Whole, windows: tuple[Window, Window], which: int
) -> tuple[Tensor, list[int], list[int]]:
    """What is seen along the axis that is not cut, the padding that it needs by hand, and that which can be left to
    others.
    """
    window, length, padding = windows[which], of.sizes[which], [0, 0]
    if window.before == window.after and not window.ceil:
        padding[which] = window.before
        return local, [0, 0], padding
    sees = window.sees(whole.here[which])
    return _narrowed(local, AXES[which], within(sees, length), 0), [*beyond(sees, length)], padding


def _narrowed(x: Tensor, dim: int, seen: range, start: int) -> Tensor:
    """Some rows of those that begin with `start`; as it is, if it is all of them."""
    return x if len(seen) == x.shape[dim] else x.narrow(dim, seen.start - start, len(seen))


def _padded(x: Tensor, by_hand: list[int], fill: float) -> Tensor:
    return F.pad(x, by_hand, value=fill) if any(by_hand) else x


def _together(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
