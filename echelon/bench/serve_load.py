"""What `echelon bench serve` asks, and when: prompts, lengths and times, each a function of the seed alone.

Random prompts are token ids. Without a tokenizer they are taken from those that every usual vocabulary has; where ids
cannot be sent (chat), they become single letters, which are a token each in most vocabularies: how many they were, the
server tells.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from echelon.models.tokenizer import Tokenizer

IDS = range(3, 256)  # below them stand special tokens; byte tokenizers end with them
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens are asked for; `prompt_tokens` is 0 where only the server can tell."""

    prompt: str | tuple[int, ...]
    output_tokens: int
    prompt_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RandomLoad:
    """As vLLM's dataset `random`: lengths spread evenly around the given ones, by `spread` of them to both sides."""

    input_tokens: int = 1024
    output_tokens: int = 128
    spread: float = 0.0
    prefix_tokens: int = 0  # the same in all prompts, before those of the input


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are sent: the gaps are gamma-distributed, `burstiness` their shape (1
    is a Poisson process, less is more bursty). All are stretched so that the last is sent at `count / rate`: otherwise
    a seed's luck would be a part of the throughput.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return [float(time) for time in times * (count / rate / times[-1])]


def lengths(count: int, middle: int, spread: float, seed: int) -> list[int]:
    low, high = math.floor(middle * (1 - spread)), math.ceil(middle * (1 + spread))
    return [max(1, int(length)) for length in np.random.default_rng(seed).integers(low, high + 1, count)]


def random_requests(
    count: int, load: RandomLoad, seed: int, ids: range = IDS, tokenizer: Tokenizer | None = None, text: bool = False
) -> list[Request]:
    """`text`: prompts are texts and not ids: what the tokenizer makes of them, or letters."""
    inputs = lengths(count, load.input_tokens, load.spread, seed)
    outputs = lengths(count, load.output_tokens, load.spread, seed + 1)
    random = np.random.default_rng(seed + 2)

    def some(number: int) -> tuple[int, ...]:
        return tuple(int(token) for token in random.integers(ids.start, ids.stop, number))

    prefix, requests = some(load.prefix_tokens), []
    for input_tokens, output_tokens in zip(inputs, outputs, strict=True):
        tokens = prefix + some(input_tokens)
        if not text:
            requests.append(Request(tokens, output_tokens, len(tokens)))
        elif tokenizer is None:
            requests.append(Request(" ".join(_LETTERS[token % len(_LETTERS)] for token in tokens), output_tokens))
        else:
            requests.append(text_request(tokenizer.decode(list(tokens)), output_tokens, tokenizer))
    return requests


def text_request(prompt: str, output_tokens: int, tokenizer: Tokenizer | None) -> Request:
    return Request(prompt, output_tokens, len(tokenizer.encode_prompt(prompt)) if tokenizer is not None else 0)


def custom_requests(count: int, path: Path, output_tokens: int, tokenizer: Tokenizer | None) -> list[Request]:
    """From a file with a JSON object a line, `{"prompt": …}`, in its order, from the start again if it has too few; a
    line's own `output_tokens` come before those given.
    """
    try:
        lines = [(number, line) for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset-path {path}: {error}") from None
    if not lines:
        raise ValueError(f'--dataset-path {path}: there is no line in it; one is {{"prompt": "…"}}')
    requests = [_read_line(line, f"line {number} of {path}", output_tokens, tokenizer) for number, line in lines]
    return list(islice(cycle(requests), count))


def _read_line(line: str, where: str, output_tokens: int, tokenizer: Tokenizer | None) -> Request:
    try:
        told = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(told, dict) or not isinstance(told.get("prompt"), str):
        raise ValueError(f'{where} has no text named "prompt"')
    length = told.get("output_tokens", output_tokens)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"{where} has output_tokens {length!r}: it is a whole number, 1 or more")
    return text_request(told["prompt"], length, tokenizer)
