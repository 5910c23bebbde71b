"""`python -m tests.conformance`: every test of PyTorch's suite for backends over Gloo and over Echelon, side by side.

Exits with 1 if anything that passes over Gloo does not pass over Echelon.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from tests.conformance.harness import TEST_SECONDS, Harness, Outcome
from tests.conformance.reference import lacks, record
from tests.conformance.suite import BACKENDS

_COLOURS = {"passed": "green", "skipped": "dim", "failed": "red", "hung": "red"}


def main(
    ranks: Annotated[int, typer.Option("-n", help="Number of ranks.")] = 2,
    pattern: Annotated[str, typer.Option("-k", help="Only tests with this in their name.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds after which a test counts as hung.")] = TEST_SECONDS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all outcomes to this file.")] = None,
    write_reference: Annotated[
        bool, typer.Option("--record", help="Write Gloo's outcomes to the reference of the tests, gloo.json.")
    ] = False,
) -> None:
    """Run PyTorch's own tests for backends over Gloo and over Echelon, and compare."""
    console = Console()
    outcomes = _run(ranks, pattern, timeout, console)
    gloo, echelon = (outcomes[backend] for backend in BACKENDS)
    lacking = [name for name in gloo if lacks(gloo[name].summary, echelon[name].summary)]
    console.print(_table(outcomes, lacking))
    for name in lacking:
        console.rule(f"{name}, over echelon: {escape(echelon[name].summary)}")
        console.print(escape(echelon[name].details), highlight=False)
    for backend in BACKENDS:
        console.print(f"{backend}: {_counts(outcomes[backend])}")
    console.print(f"Echelon lacks {len(lacking)} of what Gloo has" if lacking else "Echelon has all that Gloo has")
    if json_file:
        json_file.write_text(json.dumps({b: _as_data(o) for b, o in outcomes.items()}, indent=1) + "\n")
    if write_reference:
        record(ranks, {name: outcome.summary for name, outcome in gloo.items()})
    raise typer.Exit(bool(lacking))


def _run(ranks: int, pattern: str, timeout: float, console: Console) -> dict[str, dict[str, Outcome]]:
    outcomes: dict[str, dict[str, Outcome]] = {backend: {} for backend in BACKENDS}
    harness = Harness(ranks)
    try:
        names = [name for name in harness.names() if pattern in name]
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(names) * len(BACKENDS))
            for backend in BACKENDS:
                for name in names:
                    progress.update(bar, description=f"{backend} {name}")
                    outcomes[backend][name] = harness.run(name, backend, timeout)
                    progress.advance(bar)
    finally:
        harness.close()
    return outcomes


def _table(outcomes: dict[str, dict[str, Outcome]], lacking: list[str]) -> Table:
    table = Table("test", *BACKENDS, "")
    for name in outcomes[BACKENDS[0]]:
        cells = [_cell(outcomes[backend][name]) for backend in BACKENDS]
        table.add_row(name, *cells, "[red]lacks" if name in lacking else "")
    return table


def _cell(outcome: Outcome) -> str:
    return f"[{_COLOURS[outcome.kind]}]{escape(outcome.summary)}[/] {outcome.seconds:.1f} s"


def _counts(outcomes: dict[str, Outcome]) -> str:
    kinds = [outcome.kind for outcome in outcomes.values()]
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in _COLOURS if kind in kinds)
    return f"{counts}, in {seconds:.0f} s"


def _as_data(outcomes: dict[str, Outcome]) -> dict[str, dict[str, str | float]]:
    return {
        name: {"outcome": o.summary, "seconds": round(o.seconds, 2), "details": o.details}
        for name, o in outcomes.items()
    }


if __name__ == "__main__":
    typer.run(main)
