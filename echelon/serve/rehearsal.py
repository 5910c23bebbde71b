"""Steps that are computed before an engine begins: so memory is measured by the largest, and all kernels are compiled.

Nothing is known of the cache then, so what these steps leave in it is never found.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from echelon.serve.request import SamplingParams
from echelon.serve.sample import Draw, Draws
from echelon.serve.step import Part, Shape
from echelon.serve.way import Way

USUAL, _LIMITED, _PENALIZED, _COSTLY = (
    Draw(params, (0, 0), [0], 1)
    for params in (
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(top_p=0.5, presence_penalty=1.0, logprobs=1),
    )
)


@torch.inference_mode()
def rehearse(way: Way, shape: Shape, token_budget: int, context: int, draws_here: bool) -> None:
    """All ranks that share a model do it together, and one draws. No sequence is longer than `context`."""
    for parts, draw in _steps(shape, token_budget, context):
        chosen = way.launch(parts, Draws([draw] * len(parts)) if draws_here else None)
        if chosen is not None:
            chosen.result()


def _steps(shape: Shape, token_budget: int, context: int) -> Iterator[tuple[list[Part], Draw]]:
    """The largest: prompts alone; an answer beside prompts; answers alone, drawn in all ways. And smaller ones: by how
    many tokens there are, kernels are cut in other ways.
    """
    whole = _prompts(shape, token_budget, context)
    yield whole, USUAL
    yield [whole[0]._replace(tokens=[0]), *whole[1:]], USUAL
    answers = [Part(row, 0, [0], 0, [row % shape.pages], True) for row in range(shape.rows)]
    yield answers, _COSTLY
    yield answers, _LIMITED
    yield answers, _PENALIZED
    for count in (*_doubling(1, shape.rows), shape.rows):
        yield answers[:count], USUAL
    for count in _doubling(2, min(token_budget, context)):
        yield _prompts(shape, count, context), USUAL


def _doubling(first: int, end: int) -> Iterator[int]:
    while first < end:
        yield first
        first *= 2


def _prompts(shape: Shape, token_budget: int, context: int) -> list[Part]:
    parts: list[Part] = []
    page, left = 0, min(token_budget, shape.pages * shape.page_size)
    while left > 0 and page < shape.pages and len(parts) < shape.rows:
        length = min(left, context, (shape.pages - page) * shape.page_size)
        used = -(-length // shape.page_size)
        parts.append(Part(len(parts), 0, [0] * length, 0, list(range(page, page + used)), True))
        page, left = page + used, left - length
    return sorted(parts, key=lambda part: len(part.tokens) > 1)
