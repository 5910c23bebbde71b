"""A layout as text: a block for each stage, a row for each place in dp, cp and sp, a column for each in tp."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.parallel.layout import Layout, Stage


def drawing(layout: Layout, ranks_per_node: int | None) -> str:
    """The grid; a line across, or a bar inside a row, where a node begins."""
    columns = max(stage.tp for stage in layout.grids)
    width = max(len(f"tp {columns - 1}"), len(str(layout.size - 1)))
    lines = [f"{layout!r}: {layout.size} rank{'s' * (layout.size != 1)}"]
    for number, (stage, block) in enumerate(zip(layout.grids, layout.blocks(), strict=True)):
        labels = _labels(layout, stage)
        title = f"stage {number}" if len(layout.grids) > 1 else ""
        margin = max(len(title), *map(len, labels))
        lines += ["", f"{title:{margin}}" + "".join(f"  {f'tp {i}':>{width}}" for i in range(stage.tp))]
        for label, row in zip(labels, block.reshape(-1, stage.tp).tolist(), strict=True):
            text = f"{label:{margin}}"
            for place, rank in enumerate(row):
                begins = ranks_per_node is not None and rank % ranks_per_node == 0
                if ranks_per_node is not None and begins and place == 0:
                    lines.append(f"{'':{margin}}{'─' * ((width + 2) * stage.tp)}  node {rank // ranks_per_node}")
                text += f"{' │' if begins and place else '  '}{rank:>{width}}"
            lines.append(text)
    return "\n".join(line.rstrip() for line in lines)


def _labels(layout: Layout, stage: Stage) -> list[str]:
    """A row's place in each dimension outside of tp, written where it changes."""
    outer = {"replicate": layout.replicate, "shard": layout.shard} if layout.replicate > 1 else {"dp": layout.dp}
    degrees = {
        name: degree for name, degree in (outer | {"cp": stage.cp, "sp": math.prod(stage.tiles)}).items() if degree > 1
    }
    labels, before = [], (-1,) * len(degrees)
    for place in itertools.product(*map(range, degrees.values())):
        words = [f"{name} {at}" for name, at in zip(degrees, place, strict=True)]
        same = [place[: i + 1] == before[: i + 1] for i in range(len(place))]
        labels.append("  ".join(" " * len(word) if known else word for word, known in zip(words, same, strict=True)))
        before = place
    return labels
