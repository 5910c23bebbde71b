"""What `echelon bench serve` asks, and when."""

from __future__ import annotations

import math

import numpy as np
import pytest

from echelon.bench.serve_load import IDS, RandomLoad, Request, arrivals, custom_requests, lengths, random_requests
from echelon.models.tokenizer import Bytes


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness):
    """Of a gamma distribution, the deviation is the mean over the root of its shape."""
    gaps = np.diff(arrivals(20_000, 4.0, burstiness, seed=1), prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 4)
    assert gaps.std() == pytest.approx(1 / 4 / math.sqrt(burstiness), rel=0.05)


def test_gaps_of_a_poisson_process_are_exponential():
    gaps = np.diff(arrivals(20_000, 2.0, 1.0, seed=3), prepend=0.0)
    for seconds in (0.1, 0.5, 1.0, 2.0):
        assert (gaps > seconds).mean() == pytest.approx(math.exp(-2 * seconds), abs=0.01)


def test_the_last_comes_when_the_rate_says():
    for seed in range(5):
        times = arrivals(10, 5.0, 1.0, seed)
        assert times == sorted(times)
        assert times[-1] == pytest.approx(2.0)


def test_arrivals_are_a_function_of_the_seed():
    assert arrivals(9, 1.0, 1.0, 7) == arrivals(9, 1.0, 1.0, 7) != arrivals(9, 1.0, 1.0, 8)


def test_all_at_once():
    assert arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_lengths():
    found = lengths(5000, 100, 0.3, seed=0)
    assert (min(found), max(found)) == (70, 130)
    assert np.mean(found) == pytest.approx(100, abs=1)
    assert lengths(3, 100, 0.0, seed=0) == [100, 100, 100]
    assert min(lengths(500, 2, 0.9, seed=0)) == 1
    assert lengths(9, 100, 0.5, 1) == lengths(9, 100, 0.5, 1) != lengths(9, 100, 0.5, 2)


def test_random_prompts_are_ids_with_one_prefix():
    load = RandomLoad(input_tokens=6, output_tokens=4, spread=0.5, prefix_tokens=3)
    requests = random_requests(50, load, seed=0)
    assert requests == random_requests(50, load, seed=0) != random_requests(50, load, seed=1)
    assert len({request.prompt[:3] for request in requests}) == 1
    assert len({request.prompt for request in requests}) == 50
    assert {request.prompt_tokens for request in requests} == set(range(6, 13))
    assert {request.output_tokens for request in requests} == set(range(2, 7))
    assert all(len(request.prompt) == request.prompt_tokens for request in requests)
    assert all(token in IDS for request in requests for token in request.prompt)
    assert all(token in range(10) for request in random_requests(5, load, 0, range(10)) for token in request.prompt)


def test_random_texts():
    load = RandomLoad(input_tokens=6)
    [letters] = random_requests(1, load, seed=0, text=True)
    assert letters.prompt_tokens == 0
    assert [len(word) for word in letters.prompt.split(" ")] == [1] * 6
    [decoded] = random_requests(1, load, seed=0, ids=range(32, 127), tokenizer=Bytes(), text=True)
    assert isinstance(decoded.prompt, str)
    assert len(decoded.prompt) == decoded.prompt_tokens == 6


def test_custom_prompts_go_round(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "three", "output_tokens": 5}\n')
    one, three = Request("one", 256), Request("three", 5)
    assert custom_requests(3, path, 256, None) == [one, three, one]
    assert custom_requests(2, path, 256, Bytes()) == [Request("one", 256, 3), Request("three", 5, 5)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no line in it"),
        ('{"prompt": "a"}\n{"prompt"', "line 2 of .* is no JSON"),
        ('{"text": "a"}', 'line 1 of .* has no text named "prompt"'),
        ('["a"]', 'line 1 of .* has no text named "prompt"'),
        ('{"prompt": "a", "output_tokens": 0}', "line 1 of .* has output_tokens 0"),
    ],
)
def test_files_that_are_refused(text, words, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        custom_requests(1, path, 256, None)
    with pytest.raises(ValueError, match="No such file"):
        custom_requests(1, tmp_path / "nowhere", 256, None)
