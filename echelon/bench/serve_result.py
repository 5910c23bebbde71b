"""What came of each request, and the figures of all of them: names, definitions and rows are those of vLLM's benchmark.

TTFT is the time from sending a request to its first token, TPOT the time of each token after it on average (so of a
request), ITL each single gap between arrivals, E2EL the time to the last token. Seconds, until they are told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
OBJECTIVES = ("ttft", "tpot", "e2el")  # what a single request has
_WIDTH = 50
_DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times")
_TEXTS = ("generated_texts", "errors")


@dataclass
class Outcome:
    """One request. `queued` is how long it waited here because of the bound on running ones."""

    start: float  # since the benchmark's
    queued: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def end(self) -> float:
        return self.start + self.latency

    def arrivals(self) -> Iterator[float]:
        """When its chunks came, since the benchmark's start."""
        time = self.start + self.ttft
        yield time
        for gap in self.gaps:
            time += gap
            yield time

    def meets(self, objectives: dict[str, float]) -> bool:
        """Whether none of the times exceeds its bound, in milliseconds. Who sends one token has no time between two."""
        took = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "e2el": self.latency}
        return all(1000 * took[name] <= bound for name, bound in objectives.items())


@dataclass(frozen=True)
class Result:
    """All requests of a run. `about` is what is told of it in the file, beside the figures."""

    outcomes: Sequence[Outcome]
    duration: float
    percentiles: Sequence[float] = (99.0,)
    objectives: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error]

    def values(self, metric: str) -> list[float]:
        """Of the requests that were answered; of `itl`, of all their gaps."""
        if metric == "itl":
            return [gap for outcome in self.good for gap in outcome.gaps]
        if metric == "tpot":
            return [outcome.tpot for outcome in self.good if outcome.tpot is not None]
        return [outcome.ttft if metric == "ttft" else outcome.latency for outcome in self.good]

    def fields(self) -> dict[str, Any]:
        """The figures, by vLLM's names."""
        good, seconds = self.good, self.duration
        inputs, outputs = sum(one.prompt_tokens for one in good), sum(one.output_tokens for one in good)
        told: dict[str, Any] = {
            "duration": seconds,
            "completed": len(good),
            "failed": len(self.outcomes) - len(good),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": len(good) / seconds,
            "request_goodput": sum(one.meets(self.objectives) for one in good) / seconds if self.objectives else None,
            "output_throughput": outputs / seconds,
            "total_token_throughput": (inputs + outputs) / seconds,
            "max_output_tokens_per_s": most_in_a_second(good),
            "max_concurrent_requests": most_at_once(good),
        }
        for metric in METRICS:
            values = 1000 * np.array(self.values(metric) or [0.0])
            told |= {f"mean_{metric}_ms": values.mean(), f"median_{metric}_ms": np.median(values)}
            told |= {f"std_{metric}_ms": values.std()}
            told |= {f"p{part:g}_{metric}_ms": np.percentile(values, part) for part in self.percentiles}
        return {name: float(value) if isinstance(value, np.floating) else value for name, value in told.items()}

    def details(self) -> dict[str, list[Any]]:
        """Of each request, in the order in which they were sent."""
        each = [
            (one.prompt_tokens, one.output_tokens, one.start, one.ttft, one.gaps, one.latency, one.queued)
            for one in self.outcomes
        ]
        columns = [list(column) for column in zip(*each, strict=True)]
        told = dict(zip(_DETAILS, columns, strict=True))
        return told | dict(
            zip(_TEXTS, ([one.text for one in self.outcomes], [one.error for one in self.outcomes]), strict=True)
        )

    def write(self, path: Path, detailed: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        told = self.about | self.fields() | (self.details() if detailed else {})
        path.write_text(json.dumps(told, indent=1) + "\n")

    def lines(self, metrics: Sequence[str], rate: float = math.inf, most: int | None = None) -> Iterator[str]:
        told = self.fields()
        yield " Serving Benchmark Result ".center(_WIDTH, "=")
        yield _row("Successful requests:", told["completed"])
        yield _row("Failed requests:", told["failed"])
        if most is not None:
            yield _row("Maximum request concurrency:", most)
        if math.isfinite(rate):
            yield _row("Request rate configured (RPS):", float(rate))
        yield _row("Benchmark duration (s):", told["duration"])
        yield _row("Total input tokens:", told["total_input_tokens"])
        yield _row("Total generated tokens:", told["total_output_tokens"])
        yield _row("Request throughput (req/s):", told["request_throughput"])
        if self.objectives:
            yield _row("Request goodput (req/s):", told["request_goodput"])
        yield _row("Output token throughput (tok/s):", told["output_throughput"])
        yield _row("Peak output token throughput (tok/s):", float(told["max_output_tokens_per_s"]))
        yield _row("Peak concurrent requests:", float(told["max_concurrent_requests"]))
        yield _row("Total token throughput (tok/s):", told["total_token_throughput"])
        for metric in metrics:
            yield METRICS[metric].center(_WIDTH, "-")
            for name in ("Mean", "Median", *(f"P{part:g}" for part in self.percentiles)):
                yield _row(f"{name} {metric.upper()} (ms):", told[f"{name.lower()}_{metric}_ms"])
        yield "=" * _WIDTH


def most_in_a_second(outcomes: Sequence[Outcome]) -> int:
    """Tokens in the busiest of the seconds, counted from the first request; in each arrival of an answer as many."""
    if not outcomes:
        return 0
    first = min(outcome.start for outcome in outcomes)
    came = [
        (time, outcome.output_tokens / (len(outcome.gaps) + 1)) for outcome in outcomes for time in outcome.arrivals()
    ]
    seconds = np.bincount([int(time - first) for time, _ in came], [tokens for _, tokens in came])
    return round(float(seconds.max()))


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """Requests that ran together. One that ends when another starts is not together with it."""
    changes = sorted([(one.start, 1) for one in outcomes] + [(one.end, -1) for one in outcomes])
    running = np.cumsum([change for _, change in changes])
    return int(running.max(initial=0))


def _row(name: str, value: float) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"
