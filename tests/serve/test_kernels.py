"""The GPU's way of serving in Triton's interpreter, to test it where there is no GPU; small, since that is slow.

tests/gpu/test_serve_kernels.py and test_serve.py have the same comparisons, larger, with compiled kernels and graphs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from echelon.serve import memory, way
from echelon.serve.engine import Engine
from echelon.serve.request import SamplingParams
from echelon.serve.settings import Settings
from tests.serve import kernels as checks
from tests.serve.models import small

pytest.importorskip("triton", reason="needs Triton, whose interpreter computes kernels on a CPU")


@pytest.fixture(scope="module")
def kernels() -> Any:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: tests/gpu compares the compiled kernels")
    from echelon.serve import kernels

    return kernels


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "sum"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (3, 48), (2, 130)])
def test_norm(kernels: Any, rows: int, dim: int, centred: bool, adds: bool) -> None:
    checks.check_norm(kernels, "cpu", torch.float32, rows, dim, centred, adds)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinities are among what enters
@pytest.mark.parametrize("seed", range(12))
def test_enter(kernels: Any, seed: int) -> None:
    case = checks.random_case("cpu", torch.float32, seed, longest=20, answers=seed % 2 == 0)
    checks.check_enter(kernels, case, turns=seed % 3 > 0, norms=seed % 4 > 1)


@pytest.mark.parametrize("seed", range(12))
def test_attend(kernels: Any, seed: int) -> None:
    answers = seed % 2 == 0
    case = checks.random_case("cpu", torch.float32, seed, longest=70, answers=answers)
    checks.check_attend(kernels, case, tile=1 if answers else 8, splits=[1, 2, 3, 8][seed % 4] if answers else 1)


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (3, 40), (2, 1100)])
def test_gated(kernels: Any, rows: int, width: int) -> None:
    checks.check_gated(kernels, "cpu", torch.float32, rows, width)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (8, 300), (4, 9000)])
def test_draw(kernels: Any, rows: int, vocabulary: int) -> None:
    checks.check_draw(kernels, "cpu", torch.float32, rows, vocabulary)


def answers(name: str, params: list[SamplingParams], **settings: Any) -> list[tuple[tuple[int, ...], ...]]:
    """In a cache so small that requests are pre-empted, and in steps so small that prompts are cut."""
    model = small(name)
    limits: dict[str, Any] = {"page_size": 2, "cache_gib": 34.5 * memory.page_bytes(model, 2) / 2**30}
    engine = Engine(model, settings=Settings(token_budget=24, most_running=3, **limits, **settings))
    found = engine.generate([list(range(30, 46)), list(range(40, 55)), list(range(100, 130))], params)
    assert engine._scheduler.pages.used == 0
    assert engine._scheduler.counts.preempted
    engine.close()
    return [tuple(choice.tokens for choice in answer.choices) for answer in found]


@pytest.mark.parametrize(
    ("name", "ahead"), [("gpt2", True), ("llama3-8b", True), ("qwen3-0.6b", True), ("qwen3-0.6b", False)]
)
def test_tokens_are_those_of_the_plain_way(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, name: str, ahead: bool
) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=8, seed=4, n=2, ignore_eos=True, top_k=40, top_p=0.9, min_p=0.001, logprobs=2),
        SamplingParams(max_tokens=8, seed=5, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.2),
    ]
    expected = answers(name, params)
    monkeypatch.setattr(way, "has_kernels", lambda device: True)
    assert answers(name, params, graphs=False, ahead=ahead) == expected
