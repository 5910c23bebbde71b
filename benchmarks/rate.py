"""Requests that arrive at random, so many a second, and how long they wait: for benchmarks of serving."""

from __future__ import annotations

import statistics
import time
from itertools import chain
from typing import Any
from unittest.mock import patch

from echelon.bench.serve import drive
from echelon.bench.serve_load import RandomLoad, arrivals, random_requests
from echelon.bench.serve_target import InProcess
from echelon.serve.engine import Engine


async def at_rate(engine: Engine, per_second: float, seconds: float, vocabulary: int) -> dict[str, Any]:
    """Prompts of 51 to 461 tokens and answers of 28 to 260. Readers are in the engine's process."""
    count = int(per_second * seconds)
    lengths = RandomLoad(input_tokens=256, output_tokens=144, spread=0.8)
    requests = random_requests(count, lengths, seed=int(1000 * per_second), ids=range(100, vocabulary))
    target = InProcess(engine, {"temperature": 0.6, "ignore_eos": True}, time.perf_counter)
    steps: list[list[float]] = []
    counted = engine.metrics.next_token

    def count_too(wait: float, count: int = 1) -> None:
        steps.append([wait] * count)
        counted(wait, count)

    with patch.object(engine.metrics, "next_token", count_too):
        coming = arrivals(count, per_second, 1.0, seed=1)
        outcomes, took = await drive(target, requests, coming, None, time.perf_counter)
    answered = [each for each in outcomes if not each.error]
    return {
        "ttft p99, s": p99(each.ttft for each in answered),
        "tbt p99, ms": 1e3 * p99(gap for each in answered for gap in each.gaps),
        "of steps, tbt p99, ms": 1e3 * p99(chain(*steps)),
        "refused": len(outcomes) - len(answered),
        "tokens/s": sum(each.output_tokens for each in answered) / took,
    }


def p99(values: Any) -> float:
    return statistics.quantiles(values, n=100)[98]
