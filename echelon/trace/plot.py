"""Two pictures of a job's traffic: bytes by dimension and operation, and bytes from each rank to each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from echelon.comm.records import Log
from echelon.trace.summary import by_dimension, traffic

_MIB = 2**20


def draw(logs: dict[int, Log], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, grid) = pyplot.subplots(1, 2, figsize=(12, 4.2), width_ratios=(1.2, 1), layout="constrained")
    dimensions = by_dimension(logs)
    operations = sorted({operation for parts in dimensions.values() for operation in parts})
    colours = matplotlib.colormaps["tab10"]
    base = np.zeros(len(dimensions))
    for number, operation in enumerate(operations):
        heights = np.array([parts.get(operation, 0) / _MIB for parts in dimensions.values()])
        bars.bar(list(dimensions), heights, bottom=base, label=operation, width=0.5, color=colours(number % 10))
        base += heights
    bars.set(ylabel="MiB sent by all ranks", title="traffic by dimension")
    bars.set(xlim=(-0.7, max(len(dimensions), 1) - 0.3), ylim=(0, base.max(initial=0) * 1.1 or 1))
    bars.spines[["top", "right"]].set_visible(False)
    if operations:
        bars.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)

    matrix = traffic(logs) / _MIB
    image = grid.imshow(matrix, cmap="Blues", vmin=0)
    ticks = range(0, len(matrix), max(len(matrix) // 8, 1))
    grid.set(xlabel="to rank", ylabel="from rank", title="MiB from rank to rank", xticks=ticks, yticks=ticks)
    if len(matrix) <= 8:
        for (row, column), value in np.ndenumerate(matrix):
            if value > matrix.max() / 1000:
                colour = "white" if value > matrix.max() / 2 else "black"
                grid.text(column, row, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=9)
    figure.colorbar(image, ax=grid)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
