"""Pipelines as simulated and as measured, and beside PyTorch's own: `python benchmarks/pipeline.py`.

Starts its own ranks, on one core each: 2, and 4 and 8 where there are as many cores. Of each schedule the bubble of a
step, from the times of all actions on all ranks, beside the simulator's with the medians of those times, and beside
the closed form; the most that is saved for backward passes at a time, in microbatches of one stage. Then the time of a
step of GPipe and 1F1B, in turns with PyTorch's own schedules over the same group and over Gloo, after a look whether
their gradients are the same. With `--device cuda` the ranks share a GPU, and memory alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RANKS = {"cpu": (2, 4, 8), "cuda": (2, 4)}
CHUNKS = 2
PEERS = {"torch": "PyTorch", "torch over gloo": "PyTorch over Gloo"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/pipeline.json", help="where to write")
    parser.add_argument("--device", choices=RANKS, default="cpu")
    arguments = parser.parse_args()
    import torch

    from echelon.launch.find import find

    cores = len(os.sched_getaffinity(0))
    about = {"what": __doc__.splitlines()[0], "mpi": find().version, "torch": torch.__version__, "cores": cores}
    arguments.json.write_text(json.dumps(about | {"device": arguments.device, "ranks": {}}, indent=1) + "\n")
    for ranks in RANKS[arguments.device]:
        if ranks <= cores:
            start(ranks, arguments.json, arguments.device)
            print_tables(ranks, json.loads(arguments.json.read_text())["ranks"][str(ranks)])


def start(ranks: int, file: Path, device: str) -> None:
    """They add to the file."""
    from echelon.launch.find import find
    from echelon.launch.start import Job, run

    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("pipeline_ranks.py")
    code = run(Job(ranks, [sys.executable, str(script), "--json", str(file), "--device", device]), find())
    if code:
        sys.exit(code)


def closed_form(schedule: str, ranks: int, microbatches: int) -> float:
    """The bubble with equal stages and free messages, a backward pass being two forward ones (of Chimera one, and of
    zero-bubble two that can be apart). PipeDream's is that of a window; of an endless one it is 0.
    """
    d, n = ranks, microbatches
    return {
        "gpipe": (d - 1) / (n + d - 1),
        "1f1b": (d - 1) / (n + d - 1),
        "interleaved": (d - 1) / (CHUNKS * n + d - 1),
        "zero-bubble": (d - 1) / (3 * n + d - 1),
        "gems": (d - 1) / (d + 0.5),
        "gems-gpipe": (d - 1) / (0.6 * n + d - 1),
        "chimera": (d - 2) / (2 * n + d - 2),
        "pipedream": (d - 1) / (n + d - 1),
        "pipedream-2bw": (d - 1) / (n + d - 1),
    }[schedule]


def most_held(schedule: str, ranks: int, microbatches: int) -> float:
    """By the literature, on the rank that holds most: microbatches of one stage."""
    most = {"gpipe": microbatches, "gems": 1, "gems-gpipe": microbatches / 2}
    most |= {"interleaved": ranks + (ranks - 1) / CHUNKS}
    return float(most.get(schedule, ranks))


def print_tables(ranks: int, found: dict[str, Any]) -> None:
    rows = [(ranks, name, each) for name, each in found.items()]
    print_bubbles([row for row in rows if "bubble" in row[2]])
    print_steps([row for row in rows if "step" in row[2]])
    print_memory(rows)


def print_bubbles(rows: list[tuple[int, str, Any]]) -> None:
    columns = ("bubble", "simulated", "closed form", "step, ms", "simulated / measured")
    cells = []
    for ranks, name, found in rows:
        here = found["bubble"]
        ideal = closed_form(name, ranks, here["microbatches"])
        ratio = here["simulated_s"] / here["measured_s"]["median"]
        figures = [spread(here["measured"], 3), f"{here['simulated']:.3f}", f"{ideal:.3f}"]
        cells.append([ranks, name, here["microbatches"], *figures, spread(here["measured_s"], 0, 1e3), f"{ratio:.2f}"])
    show("bubbles", columns, cells)


def print_steps(rows: list[tuple[int, str, Any]]) -> None:
    columns = ("Echelon, ms", *(text for peer in PEERS.values() for text in (f"{peer}, ms", "Echelon's, of its")))
    cells = []
    for ranks, name, found in rows:
        here = found["step"]
        figures = [spread(here["echelon"], 0, 1e3)]
        for peer in PEERS:
            figures += [spread(here[peer], 0, 1e3), spread(here[peer]["echelon's, of its"], 2)]
        cells.append([ranks, name, found["memory"]["microbatches"], *figures])
    show("a step, forward and backward", columns, cells)


def print_memory(rows: list[tuple[int, str, Any]]) -> None:
    on_gpu = any("allocated" in found["memory"] for *_, found in rows)
    columns = ["saved, microbatches", "most, of the formula's", *["by the allocator"] * on_gpu, "copies of weights"]
    cells = []
    for ranks, name, found in rows:
        here = found["memory"]
        most = most_held(name, ranks, here["microbatches"])
        figures = [between(here["activations"]), f"{max(here['activations']) / most:.2f} × {most:g}"]
        figures += [between(here["allocated"])] if on_gpu else []
        cells.append([ranks, name, here["microbatches"], *figures, between(here["weights"])])
    show("the most that a rank holds (least … most of the ranks)", columns, cells)


def spread(figure: dict[str, float], digits: int, factor: float = 1.0) -> str:
    return f"{figure['median'] * factor:.{digits}f} ± {figure['spread'] * factor:.{digits}f}"


def between(figures: list[float]) -> str:
    least, most = f"{min(figures):.2f}", f"{max(figures):.2f}"
    return least if least == most else f"{least} … {most}"


def show(title: str, columns: Sequence[str], cells: list[list[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not cells:
        return
    table = Table(title=title, title_justify="left")
    for column in ("D", "schedule", "N", *columns):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in cells:
        table.add_row(*map(str, row))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
