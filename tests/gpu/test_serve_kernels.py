"""Each kernel of serving, compiled, beside plain PyTorch: random shapes, page placements and lengths."""

from __future__ import annotations

import pytest
import torch

from tests.serve import kernels as checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
kernels = pytest.importorskip("echelon.serve.kernels", reason="needs Triton") if torch.cuda.is_available() else None
drawing = pytest.importorskip("echelon.serve.drawing", reason="needs Triton") if torch.cuda.is_available() else None
DTYPES = pytest.mark.parametrize("dtype", checks.BOUNDS, ids=str)


@DTYPES
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "sum"])
def test_norm(dtype: torch.dtype, centred: bool, adds: bool) -> None:
    for rows, dim in ((1, 8), (3, 48), (300, 1024), (7, 5000)):
        checks.check_norm(kernels, "cuda", dtype, rows, dim, centred, adds)


@DTYPES
@pytest.mark.parametrize("part", range(3))
def test_enter(dtype: torch.dtype, part: int) -> None:
    for seed in range(part, 18, 3):
        case = checks.random_case("cuda", dtype, seed, longest=300, answers=seed % 2 == 0)
        checks.check_enter(kernels, case, turns=seed % 3 > 0, norms=seed % 4 > 1)


@DTYPES
@pytest.mark.parametrize("pieces", [1, 2, 7, 33])
def test_attend_answers(dtype: torch.dtype, pieces: int) -> None:
    for seed in range(6):
        checks.check_attend(
            kernels, checks.random_case("cuda", dtype, seed, longest=5000, answers=True), 1, [1, pieces]
        )


@DTYPES
@pytest.mark.parametrize("tile", [8, 16, 64])
def test_attend_prompts(dtype: torch.dtype, tile: int) -> None:
    for seed in range(6):
        case = checks.random_case("cuda", dtype, seed, longest=600, answers=False)
        checks.check_attend(kernels, case, max(tile // case.shared, 1))


def test_far_pages() -> None:
    pages = 2**31 // (16 * 8 * 128) + 100
    if torch.cuda.mem_get_info()[0] < 3 * 2**32:
        pytest.skip("needs 12 GiB")
    checks.check_far_pages(kernels, "cuda", torch.bfloat16, pages)


@DTYPES
def test_gated(dtype: torch.dtype) -> None:
    for rows, width in ((1, 4), (3, 40), (200, 3072), (2, 14336)):
        checks.check_gated(kernels, "cuda", dtype, rows, width)


@DTYPES
def test_in_8_bits(dtype: torch.dtype) -> None:
    for rows, columns in ((1, 16), (3, 48), (200, 3072), (2, 14336)):
        checks.check_in_8_bits(kernels, "cuda", dtype, rows, columns)


@pytest.mark.parametrize("in_fp8", [False, True], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_thin(dtype: torch.dtype, in_fp8: bool) -> None:
    for number, rows in enumerate((1, 5, 16, 33, 64, 100)):
        for columns, inner in ((16, 16), (80, 608), (1024, 3072), (4096, 14336), (28672, 4096)):
            checks.check_thin(kernels, "cuda", dtype, (rows, columns, inner), in_fp8, bias=number % 2 == 0)


@DTYPES
def test_widen(dtype: torch.dtype) -> None:
    for columns, inner in ((1, 8), (80, 600), (300, 14336)):
        checks.check_widen(kernels, "cuda", dtype, columns, inner)


@DTYPES
def test_draw(dtype: torch.dtype) -> None:
    for rows, vocabulary in ((1, 5), (8, 300), (64, 9000), (256, 151936)):
        checks.check_draw(drawing, "cuda", dtype, rows, vocabulary)


@DTYPES
def test_limit(dtype: torch.dtype) -> None:
    for seed, (rows, vocabulary) in enumerate(((1, 5), (64, 300), (64, 16385), (256, 151936))):
        checks.check_limit(drawing, "cuda", dtype, rows, vocabulary, seed)
