"""Promises of latency: the largest throughput that keeps them, and an early no to what cannot be kept.

How long a step takes is learned while steps are taken: a fixed part and a part for each token (least squares that
forget slowly). How far off that may be is learned too, from the slowest of recent steps. From both come the most
tokens of a step that ends within the time between two tokens of an answer (`tbt`), and so how many may answer at once,
and how long a prompt will wait for its first token (`ttft`).
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

_UNITS = {"s": 1.0, "ms": 1e-3}
_FORGET = 0.98  # of what a step taught, after one more step
_RECENT = 200  # steps
_SAFETY = 1.05
_LEAST = 16  # tokens of a step: prompts go on, whatever was promised


@dataclass(frozen=True)
class Slo:
    """In seconds: to the first token, and between tokens; of 99 in 100."""

    ttft: float | None = None
    tbt: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=5s,tbt=25ms`"""
        found = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|tbt)\s*=\s*(\d+\.?\d*)\s*(ms|s)\s*", part)
            if match is None or float(match[2]) == 0:
                raise ValueError(f"{part.strip()!r} is not a promise: write ttft=5s, tbt=25ms, or both with a comma")
            found[match[1]] = float(match[2]) * _UNITS[match[3]]
        return cls(**found)


class Pacer:
    """What the scheduler may do so that promises are kept."""

    def __init__(self, slo: Slo, most_tokens: int) -> None:
        self.slo, self._most_tokens = slo, most_tokens
        self._sums = [0.0] * 5  # of weights, tokens, tokens², seconds, tokens × seconds
        self._errors: deque[float] = deque(maxlen=_RECENT)  # seconds beside those expected
        self._fixed, self._each = 0.0, 0.0
        self._between_ends = 0.0  # seconds
        self._last_end: float | None = None

    def took(self, tokens: int, seconds: float) -> None:
        """A step has been taken."""
        if self._each:
            self._errors.append(seconds / max(self.expected(tokens), 1e-9))
        told = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [old * _FORGET + new for old, new in zip(self._sums, told, strict=True)]
        weight, sum_t, sum_tt, sum_s, sum_ts = self._sums
        spread = weight * sum_tt - sum_t * sum_t
        each = (weight * sum_ts - sum_t * sum_s) / spread if spread > 1e-6 * sum_tt else 0.0
        each = min(max(each, 0.0), sum_s / sum_t)
        self._each = each or sum_s / sum_t  # until steps of several sizes were seen: all of it by the token
        self._fixed = max((sum_s - self._each * sum_t) / weight, 0.0)

    def ended(self, now: float) -> None:
        """An answer is complete."""
        if self._last_end is not None:
            self._between_ends += 0.1 * (now - self._last_end - self._between_ends)
        self._last_end = now

    def expected(self, tokens: int) -> float:
        """Seconds of a step, usually."""
        return self._fixed + self._each * tokens

    @property
    def margin(self) -> float:
        """By how much the slowest of recent steps took longer than expected, and a little more."""
        ordered = sorted(self._errors)
        return _SAFETY * (max(ordered[int(0.99 * (len(ordered) - 1))], 1.0) if ordered else 1.0)

    def budget(self, answering: int) -> int:
        if self.slo.tbt is None or not self._each or not answering:
            return self._most_tokens
        return min(max(self._tokens_in_time(), answering + _LEAST), self._most_tokens)

    def most_running(self) -> int:
        if self.slo.tbt is None or not self._each:
            return self._most_tokens
        return max(self._tokens_in_time() - _LEAST, 1)

    def wait(self, tokens_ahead: int, running: int, waiting: int) -> float:
        """Seconds to the first token of a prompt, with so many tokens to compute up to its last."""
        answering = min(running, self.most_running())
        a_step = max(self.budget(answering) - answering, 1)
        steps = -(-tokens_ahead // a_step)
        seconds = steps * self.expected(answering + min(tokens_ahead, a_step)) * self.margin
        too_many = running + waiting + 1 - self.most_running()
        return seconds + max(too_many, 0) * self._between_ends

    def can_promise(self, tokens_ahead: int, running: int, waiting: int) -> bool:
        return self.slo.ttft is None or self.wait(tokens_ahead, running, waiting) <= self.slo.ttft

    def _tokens_in_time(self) -> int:
        assert self.slo.tbt is not None
        return int((self.slo.tbt / self.margin - self._fixed) / self._each)
