"""Promises of latency: the largest throughput that keeps them, and an early no to what cannot be kept.

How long a step takes is learned from the steps that were taken: a fixed part, a part for each request that answers and
one for each token of a prompt (least squares over the recent ones, of those that read prompts and of those that do not:
one kind may be rare). How far off that may be is learned too: from the slowest of them; and from when readers heard of
them, who share Python with the engine, and to whom the promise is made. From both come the most tokens of prompts in a
step that ends within the time between two tokens of an answer (`tbt`), how many may answer at once, and how long a
prompt will wait for its first token (`ttft`).

A machine that stops for a moment stops whatever a step does. So steps count for less the further they are off, and are
not planned smaller for the sake of those that would be too slow anyway: otherwise one hiccup would turn everybody away.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_UNITS = {"s": 1.0, "ms": 1e-3}
_RECENT, _ENOUGH = 100, 8  # steps: of each kind that is learned from, and after which is learned anew
_SAFETY = 1.1
_SLACK = 0.3  # of what is promised between tokens: more is not kept free for slow steps
_LEAST = 16  # tokens of prompts in a step: they go on, whatever was promised
_BLOCK = 128  # of which those that are planned are a multiple, if they are as many: GPUs fill up to it
_ROUNDS = 5  # in which the weights of steps that are far off settle


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
            if match[1] in found:
                raise ValueError(f"{match[1]} is promised twice in {text!r}")
            found[match[1]] = float(match[2]) * _UNITS[match[3]]
        return cls(**found)

    def __str__(self) -> str:
        """As `parse` reads it."""
        told = [(name, seconds) for name, seconds in (("ttft", self.ttft), ("tbt", self.tbt)) if seconds is not None]
        return ",".join(f"{name}={s:g}s" if s >= 1 else f"{name}={1e3 * s:g}ms" for name, s in told)


class Pacer:
    """What the scheduler may do so that promises are kept."""

    def __init__(self, slo: Slo, most_tokens: int) -> None:
        self.slo, self._most_tokens = slo, most_tokens
        self._answered: deque[tuple[float, ...]] = deque(maxlen=_RECENT)  # 1, answering, reading, seconds
        self._read: deque[tuple[float, ...]] = deque(maxlen=_RECENT)
        self._taken = 0
        self._costs: NDArray[np.float64] | None = None  # of the first three
        self._later: deque[float] = deque(maxlen=2 * _RECENT)  # seconds that readers waited longer than expected
        self._last_heard: float | None = None
        self._slack = 0.0  # the same of the slowest of recent steps, as they were taken or heard of
        self._between_ends = 0.0  # seconds
        self._last_end: float | None = None

    def took(self, answering: int, reading: int, seconds: float) -> None:
        """A step has been taken: the next tokens of so many answers, and so many tokens of prompts."""
        (self._read if reading else self._answered).append((1.0, answering, reading, seconds))
        self._taken += 1
        if self._taken % _ENOUGH:
            return
        steps = np.array([*self._answered, *self._read])
        self._costs = _fit(steps[:, :3], steps[:, 3])
        slower = _slowest(steps[:, 3] - steps[:, :3] @ self._costs)
        later = _slowest(np.array([*self._later])) if len(self._later) >= _ENOUGH else 0.0
        most = np.inf if self.slo.tbt is None else _SLACK * self.slo.tbt
        self._slack = min(max(slower, later, 0.0), most)

    def heard(self, expected: float | None, now: float) -> None:
        """Readers have heard of a step that was expected to take so long. None: nobody has waited for it since the last
        one. Unlike all others it may be called from any thread.
        """
        if expected and self._last_heard is not None:
            self._later.append(now - self._last_heard - expected)
        self._last_heard = now

    def ended(self, now: float) -> None:
        """An answer is complete."""
        if self._last_end is not None:
            self._between_ends += 0.1 * (now - self._last_end - self._between_ends)
        self._last_end = now

    def pause(self) -> None:
        """Nothing is left to do: how long that lasts says nothing about how fast answers end."""
        self._last_end = None

    def expected(self, answering: int, reading: int) -> float:
        """Seconds of a step, usually; 0 if nothing is known yet."""
        return 0.0 if self._costs is None else float(self._costs @ (1.0, answering, reading))

    def budget(self, answering: int) -> int:
        if self.slo.tbt is None or not answering:
            return self._most_tokens
        if self._costs is None:
            return min(answering + _LEAST, self._most_tokens)
        reading = int((self._in_time(self.slo.tbt) - self.expected(answering, 0)) / self._costs[2])
        if reading > _BLOCK:
            reading -= reading % _BLOCK
        return min(answering + max(reading, _LEAST), self._most_tokens)

    def most_running(self) -> int:
        if self.slo.tbt is None or self._costs is None:
            return self._most_tokens
        answering = (self._in_time(self.slo.tbt) - self.expected(0, _LEAST)) / self._costs[1]
        return int(min(max(answering, 1), self._most_tokens))

    def wait(self, tokens_ahead: int, running: int, waiting: int) -> float:
        """Seconds to the first token of a prompt, with so many tokens to compute up to its last."""
        answering = min(running + waiting, self.most_running())  # by then those before it will answer
        a_step = max(self.budget(answering) - answering, 1)
        seconds = tokens_ahead / a_step * self.expected(answering, a_step) * _SAFETY + self._slack
        too_many = running + waiting + 1 - self.most_running()
        return seconds + max(too_many, 0) * self._between_ends

    def _in_time(self, promised: float) -> float:
        """What a step may be expected to take so that the slowest keep the promise, too."""
        return promised / _SAFETY - self._slack

    def can_promise(self, tokens_ahead: int, running: int, waiting: int) -> bool:
        return self.slo.ttft is None or self.wait(tokens_ahead, running, waiting) <= self.slo.ttft


def _slowest(seconds_S: NDArray[np.float64]) -> float:
    return float(np.quantile(seconds_S, 0.99, method="lower"))


def _fit(parts_SP: NDArray[np.float64], seconds_S: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each part costs: the least sum of squares of what is off by little, of the rest the least sum (Huber's)."""
    weights_S = np.ones_like(seconds_S)
    for _ in range(_ROUNDS):
        costs_P = np.linalg.lstsq(parts_SP * weights_S[:, None], seconds_S * weights_S, rcond=1e-6)[0].clip(1e-9)
        off_S = np.abs(seconds_S - parts_SP @ costs_P)
        weights_S = np.sqrt(np.minimum(1, max(np.median(off_S), 1e-6) / np.maximum(off_S, 1e-6)))
    return costs_P
