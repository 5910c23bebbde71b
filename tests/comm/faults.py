"""What the fault tests and the script they run both know: the program, and what can go wrong in it."""

from __future__ import annotations

import random
from dataclasses import dataclass

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")
LENGTH = 200


@dataclass(frozen=True)
class Fault:
    """`kind` happens on rank `victim` instead of operation `moment` of the program."""

    kind: str
    victim: int
    moment: int
    seed: int

    @property
    def timeout(self) -> float:
        """For faults that only a timeout can end."""
        return 3 if self.kind in ("late", "silent") else 120


def program(fault: Fault) -> list[str]:
    """The operations that every rank does in turn."""
    chosen = random.Random(fault.seed)
    names = [chosen.choice(OPERATIONS) for _ in range(LENGTH)]
    if fault.kind in ("shape-checked", "dtype-checked"):
        names[fault.moment] = "all_reduce"
    return names
