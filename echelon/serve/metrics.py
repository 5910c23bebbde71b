"""What the engine counts, told in Prometheus's text format, and as figures of the last minutes for the page.

The engine's thread calls the first group of methods, a few times a step, so each does little under one lock. The
names are those of vLLM with another prefix, so that its dashboards need only that changed.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40, 80)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}  # as vLLM calls them

RATE_SECONDS, SERIES_SECONDS, PERCENTILE_SECONDS, SAMPLES = 10, 60, 300, 4096


class Histogram:
    """How many values were at most as large as each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class Recent:
    """The last values, for percentiles; not more than `SAMPLES` of them, and none that is old."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def add(self, now: float, value: float, count: int = 1) -> None:
        self._values.extend([(now, value)] * count)

    def percentiles(self, now: float) -> dict[str, float | None]:
        values = sorted(value for when, value in self._values if now - when <= PERCENTILE_SECONDS)
        return {f"p{share}": percentile(values, share) for share in (50, 90, 99)}


class Seconds:
    """Sums of the last whole seconds, for rates."""

    def __init__(self) -> None:
        self.total = 0.0
        self._sums: deque[tuple[int, float]] = deque(maxlen=SERIES_SECONDS + 2)  # of seconds in which there was any

    def add(self, now: float, value: float) -> None:
        self.total += value
        second = int(now)
        before = self._sums.pop()[1] if self._sums and self._sums[-1][0] == second else 0.0
        self._sums.append((second, before + value))

    def series(self, now: float) -> list[float]:
        """A value a second, the oldest first, without the second that has only begun."""
        held = dict(self._sums)
        return [held.get(second, 0.0) for second in range(int(now) - SERIES_SECONDS, int(now))]


class Metrics:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._running = self._waiting = self._pages_used = self._pages = 0
        self._totals: Counter[str] = Counter()
        self._finished: Counter[str] = Counter(dict.fromkeys(_REASONS.values(), 0))
        self._first, self._next, self._whole = Histogram(_FIRST), Histogram(_NEXT), Histogram(_WHOLE)
        self._asked, self._answered = Histogram(_TOKENS), Histogram(_TOKENS)
        self._recent_first, self._recent_next, self._recent_whole = Recent(), Recent(), Recent()
        self._taken, self._step_seconds = Histogram(_TOKENS), 0.0
        self._generated, self._ended = Seconds(), Seconds()

    def arrived(self, prompt_tokens: int) -> None:
        """A request was taken."""
        with self._lock:
            self._totals["arrived"] += 1
            self._totals["prompt_tokens"] += prompt_tokens

    def refused(self) -> None:
        """A request was not taken: there was too much to do."""
        with self._lock:
            self._totals["refused"] += 1

    def first_token(self, seconds: float) -> None:
        """An answer has begun, so long after its request arrived."""
        with self._lock:
            now = self._clock()
            self._first.add(seconds)
            self._recent_first.add(now, seconds)
            self._generated.add(now, 1)

    def next_token(self, seconds: float, count: int = 1) -> None:
        """So many answers have gone on by a token, so long after the one before."""
        with self._lock:
            now = self._clock()
            self._next.add(seconds, count)
            self._recent_next.add(now, seconds, count)
            self._generated.add(now, count)

    def finished(self, reason: str, seconds: float, prompt_tokens: int | None, generated_tokens: int) -> None:
        """An answer has ended, so long after its request arrived; the first of a request's answers tells its prompt."""
        with self._lock:
            self._finished[_REASONS.get(reason, reason)] += 1
            now = self._clock()
            self._ended.add(now, 1)
            if reason == "cancelled":  # its time says when the client left, not how fast the engine is
                return
            self._whole.add(seconds)
            self._recent_whole.add(now, seconds)
            if prompt_tokens is not None:
                self._asked.add(prompt_tokens)
            self._answered.add(generated_tokens)

    def step(self, running: int, waiting: int, pages_used: int, pages: int, tokens: int, seconds: float) -> None:
        """How things are, after a step that took so many tokens, of prompts and answers; 0 if there was no step."""
        with self._lock:
            self._running, self._waiting, self._pages_used, self._pages = running, waiting, pages_used, pages
            if tokens:
                self._taken.add(tokens)
                self._step_seconds += seconds

    def preempted(self, count: int) -> None:
        """Requests lost their pages to others, and wait again."""
        with self._lock:
            self._totals["preemptions"] += count

    def prefix(self, queried_tokens: int, hit_tokens: int) -> None:
        """Of a prompt's tokens, some were already in the cache."""
        with self._lock:
            self._totals["prefix_queries"] += queried_tokens
            self._totals["prefix_hits"] += hit_tokens

    def snapshot(self) -> dict[str, Any]:
        """How things are now, for the page: times in seconds, rates over the last ten, shares from 0 to 1."""
        with self._lock:
            now, totals = self._clock(), self._totals
            tokens = self._generated.series(now)
            queried = totals["prefix_queries"]
            return {
                "uptime": now - self._began,
                "running": self._running,
                "waiting": self._waiting,
                "kv_usage": self._usage(),
                "tokens_per_second": _rate(tokens, now - self._began),
                "requests_per_second": _rate(self._ended.series(now), now - self._began),
                "tokens_series": tokens,
                "ttft": self._recent_first.percentiles(now),
                "tbt": self._recent_next.percentiles(now),
                "e2e": self._recent_whole.percentiles(now),
                "prompt_tokens": totals["prompt_tokens"],
                "generation_tokens": int(self._generated.total),
                "finished": dict(self._finished),
                "refused": totals["refused"],
                "preemptions": totals["preemptions"],
                "prefix_hit_rate": totals["prefix_hits"] / queried if queried else None,
            }

    def render(self, model: str) -> str:
        """All of it in Prometheus's text format."""
        with self._lock:
            return "".join(self._families(f'model_name="{_escaped(model)}"'))

    def _families(self, label: str) -> Iterable[str]:
        totals = self._totals
        yield _family("num_requests_running", "gauge", "Requests that share in each step.", label, self._running)
        yield _family("num_requests_waiting", "gauge", "Requests that wait for a place.", label, self._waiting)
        yield _family("kv_cache_usage_perc", "gauge", "Share of the cache's pages in use.", label, self._usage())
        for name, key, words in (
            ("prompt_tokens", "prompt_tokens", "Tokens of the prompts that were taken."),
            ("num_preemptions", "preemptions", "Requests that lost their pages to others for a while."),
            ("prefix_cache_queries", "prefix_queries", "Tokens of prompts that were looked up in the cache."),
            ("prefix_cache_hits", "prefix_hits", "Tokens of prompts that were found in the cache."),
            ("num_requests_refused", "refused", "Requests that were not taken: there was too much to do."),
        ):
            yield _family(f"{name}_total", "counter", words, label, totals[key])
        written = int(self._generated.total)
        yield _family("generation_tokens_total", "counter", "Tokens that were generated.", label, written)
        yield _family("step_seconds_total", "counter", "Time in the engine's steps.", label, self._step_seconds)
        yield _head("request_success_total", "counter", "Requests that have ended, by why.")
        for reason, count in self._finished.items():
            yield f'echelon:request_success_total{{finished_reason="{_escaped(reason)}",{label}}} {count}\n'
        for name, words, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", self._first),
            ("inter_token_latency_seconds", "From a token of an answer to its next.", self._next),
            ("e2e_request_latency_seconds", "From a request's arrival to its end.", self._whole),
            ("iteration_tokens_total", "Tokens of a step, of prompts and answers.", self._taken),
            ("request_prompt_tokens", "Tokens of a request's prompt.", self._asked),
            ("request_generation_tokens", "Tokens of an answer.", self._answered),
        ):
            yield from _buckets(name, words, label, histogram)

    def _usage(self) -> float:
        return self._pages_used / self._pages if self._pages else 0.0


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of sorted values, between the two nearest."""
    if not values:
        return None
    at = (len(values) - 1) * share / 100
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def _rate(series: Sequence[float], uptime: float) -> float:
    seconds = max(1, min(RATE_SECONDS, int(uptime)))
    return sum(series[-seconds:]) / seconds


def _head(name: str, kind: str, words: str) -> str:
    return f"# HELP echelon:{name} {words}\n# TYPE echelon:{name} {kind}\n"


def _family(name: str, kind: str, words: str, label: str, value: float) -> str:
    return _head(name, kind, words) + f"echelon:{name}{{{label}}} {value}\n"


def _buckets(name: str, words: str, label: str, histogram: Histogram) -> Iterable[str]:
    yield _head(name, "histogram", words)
    so_far = 0
    for bound, count in zip((*map(str, map(float, histogram.bounds)), "+Inf"), histogram.counts, strict=True):
        so_far += count
        yield f'echelon:{name}_bucket{{{label},le="{bound}"}} {so_far}\n'
    yield f"echelon:{name}_sum{{{label}}} {histogram.sum}\nechelon:{name}_count{{{label}}} {so_far}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
