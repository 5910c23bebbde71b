"""What is asked of the engine and what it answers: plain data, the same for Python, the command and the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Finish = Literal["stop", "length", "cancelled"]
_HUGE = 1e300
MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS = 128, 20, 16


class BadRequest(ValueError):
    """What cannot be answered, however often it is asked; `parameter` names what is wrong."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class Refused(RuntimeError):
    """The engine has too much to do: ask again later."""

    def __init__(self, message: str, retry_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class EngineFailed(RuntimeError):
    """The engine has ended: nothing is answered any more."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to go on with a prompt. Penalties are for tokens that were there before: `repetition_penalty` counts the
    prompt's too, and divides (or multiplies) their logits; the other two subtract, for each token of the answer.
    """

    max_tokens: int | None = 16  # None: as many as the model's context leaves
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # only the so-many likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together have this probability
    min_p: float = 0.0  # only those with this share of the likeliest's probability
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: another each time
    logprobs: int | None = None  # how many of the likeliest tokens to tell beside the chosen; None: not even its own
    n: int = 1  # how many answers
    stop: tuple[str, ...] = ()  # texts at which to end; they are not part of the answer
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1)
        _number("temperature", self.temperature, 0, 100)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        _number("presence_penalty", self.presence_penalty, -100, 100)
        _number("frequency_penalty", self.frequency_penalty, -100, 100)
        _whole("seed", self.seed, -(2**63), 2**63 - 1)
        _whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        _whole("n", self.n, 1, MOST_CHOICES)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise BadRequest("stop must be texts, none of them empty", "stop")
        if len(self.stop) > MOST_STOPS:
            raise BadRequest(f"stop has {len(self.stop)} texts: {MOST_STOPS} are the most", "stop")


class Logprob(NamedTuple):
    """A token of an answer, how likely it was, and the likeliest ones in its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # and not frozen, which takes three times as long to make: there may be one for each token
class Piece:
    """What has come of one of a request's answers since its last piece: of one step, or of several. The text may
    lag behind the tokens: a character can take several, and what may become a stop text is held back.
    """

    index: int  # which of the n answers
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish: Finish | None = None
    cached: int = 0  # of the prompt's tokens, those that were taken from the cache


@dataclass(frozen=True)
class Choice:
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish: Finish


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    choices: tuple[Choice, ...]
    cached: int

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if value is None and name in ("max_tokens", "seed", "logprobs"):
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"{name} must be a whole number, not {value!r}", name)
    if value < low or (high is not None and value > high):
        raise BadRequest(f"{name} is {value}: it must be {_between(low, high)}", name)


def _number(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_HUGE < value < _HUGE:
        raise BadRequest(f"{name} must be a number, not {value!r}", name)
    if value < low or value > high or (above and value == low):
        raise BadRequest(f"{name} is {value:g}: it must be {'above' if above else 'from'} {low:g} to {high:g}", name)


def _between(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"
