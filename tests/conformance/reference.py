"""How the tests ended over Gloo, as recorded by `python -m tests.conformance --record`: test → outcome, by ranks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conformance.suite import PASSED

_FILE = Path(__file__).with_name("gloo.json")


def recorded() -> dict[int, dict[str, str]]:
    """By number of ranks, every test's outcome over Gloo."""
    if not _FILE.exists():
        return {}
    return {int(ranks): outcomes for ranks, outcomes in json.loads(_FILE.read_text()).items()}


def record(ranks: int, outcomes: dict[str, str]) -> None:
    """Replace these tests' outcomes for this number of ranks."""
    known = recorded()
    known[ranks] = known.get(ranks, {}) | outcomes
    _FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def lacks(gloo: str, echelon: str) -> bool:
    """Whether Echelon lacks what Gloo has; a test that Gloo runs must not be skipped either."""
    return gloo == PASSED and echelon != PASSED
