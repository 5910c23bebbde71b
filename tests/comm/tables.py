"""Random tables of routes, the same for all who draw with the same seed."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.comm.routes import ALGORITHMS, OPERATIONS, SIZED, Road, Rule, Table
from echelon.comm.tables import VARIABLE

BOUNDS = (16, 500, 4000, 100_000)  # bytes at which the road may change
ROADS = [Road(transport, algorithm) for transport in ("mpi", "gloo") for algorithm in ("", *ALGORITHMS)]


def random_table(seed: int, sizes: tuple[int, ...]) -> Table:
    """Every road for every operation that has it, at random, in groups of these sizes on one node."""
    choice = random.Random(seed)
    rules = []
    for operation in OPERATIONS:
        serving = [road for road in ROADS if road.serves(operation)]
        for size in sizes:
            for low in (False, True):
                bounds = choice.sample(BOUNDS, choice.randrange(len(BOUNDS))) if operation in SIZED else []
                steps = tuple((start, choice.choice(serving)) for start in [0, *sorted(bounds)])
                rules.append(Rule(operation, size, 1, steps, low=low))
    return Table(tuple(rules))


@contextmanager
def in_force(table: Table) -> Iterator[None]:
    """For the groups that this rank makes meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routes.json"
        path.write_text(table.to_text())
        os.environ[VARIABLE] = str(path)
        try:
            yield
        finally:
            del os.environ[VARIABLE]
