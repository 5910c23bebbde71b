"""Images cut into tiles in a layout: who computes which tile of which stage, and the groups in which they do.

Where all stages are cut alike, the ranks of a tile form a pipeline of their own; where stages differ, one pipeline has
all ranks of all tiles, and each stage a crew of them (pipeline/crews.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from echelon.comm.torch_compat import mesh_of, stay_out_of
from echelon.parallel import batchnorm, spatial
from echelon.parallel.layout import Grid, Layout
from echelon.parallel.pipeline.actions import Direction
from echelon.parallel.pipeline.crews import Crews
from echelon.parallel.pipeline.run import Pipeline
from echelon.parallel.spatial.tiles import Ground

TILES, STATISTICS = "sp", "statistics"  # the views of those who share images, and of all whose images are averaged


def tile(model: Any, grid: Grid, directions: Sequence[Direction], *, global_batchnorm: bool) -> None:
    """Let a model compute tiles, or of a pipeline those stages that do. Statistics of batches are always of whole
    images, and with `global_batchnorm` of all of them.
    """
    model.grounds = grounds = _grounds(grid, directions, global_batchnorm)
    if grid.layout.depth == 1:
        spatial.on_ground(model, grounds["down"])
        return
    spatial.name_modules(model)
    if global_batchnorm:
        modules = dict(model.named_modules())
        grids = itertools.cycle(grid.layout.grids)  # with chunks they come again
        whole = [span for span, stage in zip(model.spans, grids, strict=False) if stage.tiles == (1, 1)]
        for name in (name for span in whole for link in span for name in model.parts(link) if name in modules):
            batchnorm.synchronize(modules[name], grid.mesh("dp"))


def crews_of(layout: Layout) -> Crews:
    """Who computes the stages of a pipeline: where they differ a group of `pp` has all ranks of all crews, else one of
    each.
    """
    if layout.stages is None or len(set(layout.grids)) == 1:
        return Crews.alone(layout.depth)
    return _tiles_of(layout)


def seat(layout: Layout, rank: int, direction: Direction) -> int:
    """Which of its stage's tiles a rank has that goes a way."""
    crews = _tiles_of(layout)
    inside = next(ranks.tolist().index(rank) for ranks in _wholes(layout) if rank in ranks)
    return crews.crew(crews.place(inside, direction), direction).ranks.index(inside)


@dataclass(frozen=True)
class Needs:
    """What a rank needs of a microbatch: all of its images, a tile of each on a ground, or none; and of targets of each
    pixel all, or those of the tile.
    """

    images: bool = True
    ground: Ground | None = None
    whole_targets: bool = False


def needs_of(model: Any, runner: Pipeline | None, microbatch: int) -> Needs:
    """In a pipeline the first stage takes images, and the last one targets, of which it may need all."""
    grounds: Mapping[Direction, Ground] = getattr(model, "grounds", {})
    if runner is None:
        return Needs(ground=grounds.get("down"))
    direction = runner.schedule.direction_of(microbatch)
    if runner.rank not in runner.crews.crew(0, direction).ranks:
        return Needs(images=False, whole_targets=True)
    return Needs(ground=grounds[direction] if runner.has_tiles(0) else None, whole_targets=True)


def mesh_of_mine(grid: Grid, groups: Sequence[Sequence[int]], name: str) -> DeviceMesh | None:
    """The mesh of the one of these groups that this rank is in; made together, by all ranks of the world."""
    found = None
    for group in map(list, groups):
        if grid.rank in group:
            found = mesh_of(grid.mesh("data").device_type, group, (name,))
        else:
            stay_out_of([group])
    return found


def _tiles_of(layout: Layout) -> Crews:
    return Crews(tuple(stage.tiles for stage in layout.grids))


def _wholes(layout: Layout) -> list[NDArray[np.int64]]:
    """The ranks that have all stages of all tiles, one such set for each of dp."""
    blocks = [block.reshape(layout.dp, -1) for block in layout.blocks()]
    return [np.concatenate([block[row] for block in blocks]) for row in range(layout.dp)]


def _grounds(grid: Grid, directions: Sequence[Direction], global_batchnorm: bool) -> dict[Direction, Ground]:
    """The tiles around this rank, for each way that microbatches go; called by all ranks, which make groups in one
    order.
    """
    found: dict[Direction, Ground] = {}
    layout, crews, wholes = grid.layout, _tiles_of(grid.layout), _wholes(grid.layout)
    for direction, place in itertools.product(directions, range(layout.depth)):
        crew = crews.crew(place, direction)
        if crew.tiles == (1, 1):
            continue
        tiles = [ranks[list(crew.ranks)].reshape(crew.tiles) for ranks in wholes]
        everyone = mesh_of_mine(grid, [each.flatten().tolist() for each in tiles], TILES)
        lines = [
            None if count == 1 else everyone if count == len(crew.ranks) else mesh_of_mine(grid, groups, TILES)
            for count, groups in zip(crew.tiles, ([*_columns(tiles)], [*_rows(tiles)]), strict=True)
        ]
        over = everyone
        if global_batchnorm and layout.dp > 1:
            over = mesh_of_mine(grid, [np.concatenate(tiles, axis=None).tolist()], STATISTICS)
        if everyone is not None and over is not None:
            down, across = (None if line is None else line.get_group() for line in lines)
            found[direction] = Ground((down, across), everyone.get_group(), over.get_group())
    return found


def _rows(tiles: Sequence[NDArray[np.int64]]) -> Iterator[list[int]]:
    yield from (row.tolist() for each in tiles for row in each)


def _columns(tiles: Sequence[NDArray[np.int64]]) -> Iterator[list[int]]:
    yield from (column.tolist() for each in tiles for column in each.T)
