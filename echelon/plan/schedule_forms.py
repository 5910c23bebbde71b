"""The closed forms of pipeline schedules: bubble, activations and weights of D ranks, N microbatches and v chunks.

Each says what it assumes: the simulator equals it there, and shows the difference elsewhere. All assume equal stages
and messages that take no time. Activations count microbatches of a rank's share of the model, weights its copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Form:
    """A formula and its value; where ranks differ, of the one that has least and of the one that has most."""

    formula: str
    least: float
    most: float
    assumes: str = ""


@dataclass(frozen=True)
class Forms:
    bubble: Form
    activations: Form
    weights: Form


def closed_forms(schedule: Schedule, *, backward: float = 2.0) -> Forms:
    """Of a schedule made by name. `backward` is its cost in forwards: gems has one form for 1 and one for 2."""
    d, n, v = schedule.ranks, schedule.microbatches, schedule.chunks
    filled = _all("(D−1)/(N+D−1)", (d - 1) / (n + d - 1))
    falling = Form("1 … D", 1, d, "N ≥ D")
    lasting = _all("0", 0, "N → ∞")
    equal = _all("(D−1)/(D+1)", (d - 1) / (d + 1), "N → ∞")
    double = _all("(D−1)/(D+½)", (d - 1) / (d + 0.5), "backward = 2 × forward, N → ∞")
    run_equal = _all("(D−1)/(⅔N+D−1)", (d - 1) / (2 * n / 3 + d - 1), "backward = forward")
    run_double = _all("(D−1)/(⅗N+D−1)", (d - 1) / (3 * n / 5 + d - 1), "backward = 2 × forward")
    one, two = _all("1", 1), _all("2", 2)
    return {
        "gpipe": Forms(filled, _all("N", n), one),
        "1f1b": Forms(filled, falling, one),
        "interleaved": Forms(
            _all("(D−1)/(vN+D−1)", (d - 1) / (v * n + d - 1)),
            Form("D−(D−1)/v … D+(D−1)/v", d - (d - 1) / v, d + (d - 1) / v, "N ≥ 2D"),
            one,
        ),
        "zero-bubble": Forms(
            _all("(D−1)/(3N+D−1)", (d - 1) / (3 * n + d - 1), "F = B = W, N ≥ D"), _all("D", d, "N ≥ D"), one
        ),
        "gems": Forms(equal if backward == 1 else double, one, two),
        "gems-gpipe": Forms(run_equal if backward == 1 else run_double, _all("⌈N/2⌉", -(-n // 2)), two),
        "chimera": Forms(
            _all("(D−2)/(2N+D−2)", (d - 2) / (2 * n + d - 2), "backward = forward, D | N"),
            Form("D/2+1 … D", d / 2 + 1, d, "N ≥ D"),
            two,
        ),
        "pipedream": Forms(lasting, falling, Form("1 … D", 1, d, "N ≥ 2D−1")),
        "pipedream-2bw": Forms(lasting, falling, _all("2", 2, "N ≥ 2D")),
    }[schedule.name]


def _all(formula: str, value: float, assumes: str = "") -> Form:
    return Form(formula, value, value, assumes)
