"""The links of an emulated cluster: what their counters say, beside what was recorded.

`echelon run --cluster … --record DIR` leaves DIR/links.json; a link also carries headers, acknowledgements and what the
launcher says to the ranks, so it shows somewhat more than the record.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Link:
    """One node's: bytes by the interface's counters, and those that its ranks' records send to other nodes."""

    node: str
    ranks: list[int]
    sent: int
    received: int
    recorded: int


def read_links(folder: Path, traffic: NDArray[np.int64]) -> list[Link]:
    """None, if the job did not run on an emulated cluster."""
    file = folder / "links.json"
    if not file.exists():
        return []
    links = []
    for node in json.loads(file.read_text())["nodes"]:
        mine = [rank for rank in node["ranks"] if rank < len(traffic)]
        elsewhere = [rank for rank in range(len(traffic)) if rank not in mine]
        recorded = int(traffic[np.ix_(mine, elsewhere)].sum())
        links.append(Link(node["name"], node["ranks"], node["sent"], node["received"], recorded))
    return links
