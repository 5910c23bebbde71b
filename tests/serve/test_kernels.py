"""The GPU's way of serving in Triton's interpreter, to test it where there is no GPU; small, since that is slow.

tests/gpu/test_serve_kernels.py and test_serve.py have the same comparisons, larger, with compiled kernels and graphs;
and the kernel that rounds to 8-bit floats, at which the interpreter errs: it loses carries into the exponent.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.models.tokenizer import Bytes
from echelon.serve import memory, way
from echelon.serve.engine import Engine
from echelon.serve.quantize import quantize
from echelon.serve.request import SamplingParams
from echelon.serve.settings import Settings
from echelon.serve.step import PENDING, Part, Shape
from echelon.serve.text import Text
from tests.serve import kernels as checks
from tests.serve.models import Replayed, small

pytest.importorskip("triton", reason="needs Triton, whose interpreter computes kernels on a CPU")


@pytest.fixture(scope="module")
def kernels() -> Any:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: tests/gpu compares the compiled kernels")
    from echelon.serve import kernels

    return kernels


@pytest.fixture(scope="module")
def drawing(kernels: Any) -> Any:
    from echelon.serve import drawing

    return drawing


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
    checks.check_attend(
        kernels, case, tile=1 if answers else 8, pieces=range(1, [2, 3, 4, 21][seed // 2 % 4]) if answers else ()
    )


def test_attend_in_many_pieces(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are put together at a time."""
    monkeypatch.setattr(kernels, "_keys_and_stages", lambda *_: (16, 2))
    case = replace(checks.random_case("cpu", torch.float32, 1, longest=9, answers=True), lengths=[1280], queries=[1])
    for pieces in (16, 20, 40, 80):
        checks.check_attend(kernels, replace(case, seed=pieces), 1, [pieces])


def test_far_pages(kernels: Any) -> None:
    checks.check_far_pages(kernels, "cpu", torch.float32, 100)


def test_empty_tiles_read_nothing(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which graphs are filled up: they name the first place, whose sequence may be long."""
    from triton.runtime.interpreter import InterpreterBuilder

    products = []
    multiply = InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *each: products.append(0) or multiply(*each))
    case = replace(checks.random_case("cpu", torch.float32, 0, longest=9, answers=True), lengths=[400], queries=[1])
    q = case.draw(1, case.heads * case.shared, case.dim)
    for count, read in ((0, False), (1, True)):
        out, tiles = torch.zeros_like(q), torch.tensor([[0, count, 0, 1, 0]]).int()
        kernels.attend(q, tiles, case.rows, case.positions, case.table, case.keys, case.values, out, queries=1)
        assert bool(products) == read
        assert bool(out.any()) == read


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (3, 40), (2, 1100)])
def test_gated(kernels: Any, rows: int, width: int) -> None:
    checks.check_gated(kernels, "cpu", torch.float32, rows, width)


@pytest.mark.parametrize("in_fp8", [False, True], ids=["int8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 80, 600), (17, 32, 256), (70, 48, 1100)], ids=str)
def test_thin(kernels: Any, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], in_fp8: bool) -> None:
    for count in (1, 3):
        monkeypatch.setattr(kernels, "processors", lambda device, count=count: count)
        kernels._counts.cache_clear()
        checks.check_thin(kernels, "cpu", torch.float32, shape, in_fp8, bias=count > 1)


@pytest.mark.parametrize("inner", [3, 64, 5000])
def test_widen(kernels: Any, inner: int) -> None:
    checks.check_widen(kernels, "cpu", torch.float32, 5, inner)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (8, 300), (4, 9000)])
def test_draw(drawing: Any, rows: int, vocabulary: int) -> None:
    checks.check_draw(drawing, "cpu", torch.float32, rows, vocabulary)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinities are among what is drawn from
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_limit(drawing: Any, dtype: torch.dtype, seed: int) -> None:
    for vocabulary in (1, 40, 300):
        checks.check_limit(drawing, "cpu", dtype, 16, vocabulary, seed)


def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if sequences were long and there were a GPU; and nobody's values are no numbers. Gives how many pieces were
    put together, each time.
    """
    from echelon.serve import kernels, pieces

    monkeypatch.setattr(pieces, "_BLOCK", 4)
    monkeypatch.setattr(kernels, "processors", lambda device: 6)
    monkeypatch.setattr(kernels, "_keys_and_stages", lambda *_: (4, 2))
    joined = [0]
    of = pieces.Pieces.of

    def told(self: Any, keys_A: Any) -> Any:
        tiles_X5, joins_J3 = of(self, keys_A)
        joined.extend(joins_J3[:, 1].tolist())
        return tiles_X5, joins_J3

    monkeypatch.setattr(pieces.Pieces, "of", told)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *given, **named: no_numbers(empty_like(*given, **named)))
    return joined


def no_numbers(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() else x


def answers(name: str, params: list[SamplingParams], **settings: Any) -> list[tuple[tuple[int, ...], ...]]:
    """In a cache so small that requests are pre-empted, and in steps so small that prompts are cut."""
    model = small(name, layers=1)
    limits: dict[str, Any] = {"page_size": 2, "cache_gib": 34.5 * memory.page_bytes(model, 2) / 2**30}
    engine = Engine(model, settings=Settings(token_budget=24, most_running=3, **limits, **settings))
    found = engine.generate([list(range(30, 46)), list(range(40, 55)), list(range(100, 130))], params)
    assert engine._scheduler.pages.used == 0
    assert engine._scheduler.counts.preempted
    engine.close()
    return [tuple(choice.tokens for choice in answer.choices) for answer in found]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of nobody's places, where anything may lie
@pytest.mark.parametrize(
    ("name", "graphs", "ahead"),
    [
        ("gpt2", False, True),
        ("llama3-8b", False, True),
        ("llama3-8b", True, True),
        ("qwen3-0.6b", True, True),
        ("qwen3-0.6b", False, False),
    ],
)
def test_tokens_are_those_of_the_plain_way(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, name: str, graphs: bool, ahead: bool
) -> None:
    from echelon.serve import fused

    params = [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=8, seed=4, n=2, ignore_eos=True, top_k=40, top_p=0.9, min_p=0.001, logprobs=2),
        SamplingParams(max_tokens=8, seed=5, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.2),
    ]
    expected = answers(name, params)
    monkeypatch.setattr(way, "has_kernels", lambda device: True)
    monkeypatch.setattr(fused, "Captures", object)
    monkeypatch.setattr(fused, "Graph", Replayed)
    monkeypatch.setattr(fused, "quickest", lambda least, seconds: least + 16)
    monkeypatch.setattr(Replayed, "used", 0)
    joined = in_small_pieces(monkeypatch)
    assert answers(name, params, graphs=graphs, ahead=ahead) == expected
    assert bool(Replayed.used) == graphs
    assert max(joined) > 2, "keys were not read in pieces, so that was not tried"


def test_many_short_prompts_are_one_graph(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from echelon.serve import fused

    monkeypatch.setattr(fused, "Captures", object)
    monkeypatch.setattr(fused, "Graph", Replayed)
    monkeypatch.setattr(fused.Fused, "_forward", lambda self, computed: computed.places_3T)  # it would take minutes
    model = small(layers=1).bfloat16()
    way.prepare(model)
    sizes = [fused.Size(*size) for size in way.sizes_of_mixed(64, 1024)]
    step = fused.Fused(model, Shape(100, 16, 64, 8), 1024, sizes)
    for count, length in ((60, 8), (30, 17), (5, 100), (16, 2)):
        parts = [Part(row, 0, [1] * length, 0, [row % 100], False) for row in range(count)]
        size = step._size(parts, 0)
        assert size is not None, (count, length)
        monkeypatch.setattr(Replayed, "used", 0)
        step.launch(parts, None)
        assert Replayed.used == 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_in_8_bits_are_computed_by_the_kernels_too(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With gate and up as one product."""

    def ask() -> list[Any]:
        model = quantize(small(layers=1, dim=64, heads=4, kv_heads=2, mlp_dim=96), kind)
        engine = Engine(model, settings=Settings(cache_gib=0.01, most_running=2, token_budget=32, graphs=False))
        assert engine._runner.choice.fused == way.has_kernels(torch.device("cpu"))
        found = engine.generate([list(range(20)), [7]], SamplingParams(max_tokens=6, temperature=0, logprobs=1))
        engine.close()
        return [each for answer in found for each in answer.choices[0].logprobs]

    expected = ask()
    monkeypatch.setattr(way, "has_kernels", lambda device: True)
    for ours, theirs in zip(ask(), expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=0.1 if kind == "fp8" else 1e-4)


def test_answers_that_end_by_themselves_end_one_step_late_and_unseen(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(30, 40)), list(range(60, 80)), list(range(5))]
    params = SamplingParams(max_tokens=10, temperature=0, logprobs=1)

    def ask(text: Text, more: SamplingParams) -> list[Any]:
        engine = Engine(small(layers=1), text, Settings(cache_gib=0.01, most_running=3, token_budget=32, graphs=False))
        found = engine.generate(prompts, [params, more, params])
        assert engine._scheduler.pages.used == 0
        engine.close()
        return [[(each.text, each.tokens, each.finish) for each in answer.choices] for answer in found]

    whole = ask(Text(Bytes()), params)
    end = whole[0][0][1][3]  # a token of the first answer, and a letter of the second
    stop = next(chr(token) for token in whole[1][0][1][2:] if token < 128 and token != end)
    text, more = Text(Bytes(), ends=[end]), replace(params, stop=(stop,))
    expected = ask(text, more)
    assert [choice[2] for (choice,) in expected[:2]] == ["stop", "stop"]
    monkeypatch.setattr(way, "has_kernels", lambda device: True)
    from echelon.serve.fused import Fused

    launched: list[Part] = []
    launch = Fused.launch
    monkeypatch.setattr(
        Fused, "launch", lambda self, parts, draws: launched.extend(parts) or launch(self, parts, draws)
    )
    assert ask(text, more) == expected
    assert any(part.tokens == [PENDING] for part in launched), "no step was launched ahead, so that was not tried"


def test_what_the_kernels_cannot_compute_is_computed_plainly(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "has_kernels", lambda device: True)
    assert way.choose(small(), Settings()).fused
    assert way.choose(small().double(), Settings()).why_not == "it is in torch.float64"
    assert way.choose(quantize(small(), "int8-dynamic"), Settings()).why_not == "its weights are torchao's"
    assert way.choose(small(), Settings(fused=False)).why_not == "fused kernels are turned off"
    assert way.choose(small(), Settings(reproducible=True)).why_not == "reproducible"
