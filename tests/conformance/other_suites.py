"""`python -m tests.conformance.other_suites FILE…`: tests of PyTorch's repository, over Gloo and over Echelon.

The files, such as `test/distributed/tensor/test_dtensor.py` and `test/distributed/_composable/fsdp/*.py`, are in no
wheel: they are given by path, from a checkout of the release that is installed. On CPUs not all of their tests make
sense, and Gloo says which: only what passes over Gloo runs over Echelon.

Exits with 1 if anything that passes over Gloo does not pass over Echelon.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.conformance import file_suite
from tests.conformance.harness import FAILED, HUNG, TEST_SECONDS, Harness, Outcome
from tests.conformance.suite import PASSED, SKIPPED

_KINDS = (PASSED, SKIPPED, FAILED, HUNG)


def main(
    files: Annotated[list[Path], typer.Argument(help="Test files of PyTorch's repository.", exists=True)],
    ranks: Annotated[int, typer.Option("-n", help="Number of ranks; test cases for another number are skipped.")] = 4,
    pattern: Annotated[str, typer.Option("-k", help="Only tests with this in their name.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds after which a test counts as hung.")] = TEST_SECONDS,
) -> None:
    """Run tests of PyTorch's repository over Gloo, and over Echelon what passes there."""
    console = Console()
    table = Table("file", "backend", *_KINDS, "seconds")
    lacking: dict[str, Outcome] = {}
    for file in files:
        gloo, echelon = _run_file(file, ranks, pattern, timeout, console)
        table.add_row(file.name, "gloo", *_counts(gloo))
        table.add_row("", "echelon", *_counts(echelon))
        lacking |= {name: outcome for name, outcome in echelon.items() if outcome.kind != PASSED}
    console.print(table)
    for name, outcome in lacking.items():
        console.print(f"lacking: {_short(name)}: {escape(outcome.summary)}", highlight=False)
    raise typer.Exit(bool(lacking))


def _run_file(
    file: Path, ranks: int, pattern: str, timeout: float, console: Console
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """The outcomes over Gloo, and over Echelon of what passes over Gloo. Each file has ranks of its own."""
    harness = Harness(ranks, file_suite.test_names, file_suite.run_test)
    try:
        names = [name for name in harness.names(str(file.resolve())) if pattern in _short(name)]
        gloo = {name: _run(harness, name, "gloo", timeout, console) for name in names}
        passed = [name for name, outcome in gloo.items() if outcome.kind == PASSED]
        return gloo, {name: _run(harness, name, "echelon", timeout, console) for name in passed}
    finally:
        harness.close()


def _run(harness: Harness, name: str, backend: str, timeout: float, console: Console) -> Outcome:
    outcome = harness.run(name, backend, timeout)
    console.print(f"{backend} {_short(name)}: {escape(outcome.summary)} {outcome.seconds:.1f} s", highlight=False)
    if backend == "echelon" and outcome.kind != PASSED:
        console.print(escape(outcome.details), highlight=False)
    return outcome


def _short(name: str) -> str:
    path, _, test = name.partition("::")
    return f"{Path(path).stem}::{test}"


def _counts(outcomes: dict[str, Outcome]) -> list[str]:
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    return [*(str(kinds[kind]) for kind in _KINDS), f"{seconds:.0f}"]


if __name__ == "__main__":
    typer.run(main)
