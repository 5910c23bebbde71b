"""The steps that are rehearsed are those that there can be: within the cache, the budget and the context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.serve.rehearsal import _steps
from echelon.serve.step import Shape


@given(st.integers(2, 60), st.sampled_from([2, 16]), st.integers(1, 20), st.integers(1, 300), st.integers(1, 200))
def test_steps_fit(pages: int, size: int, rows: int, budget: int, context: int) -> None:
    context = min(context, pages * size)
    shape = Shape(pages, size, rows, -(-context // size))
    steps = [parts for parts, _ in _steps(shape, budget, context)]
    for parts in steps:
        assert [len(part.tokens) > 1 for part in parts] == sorted(len(part.tokens) > 1 for part in parts)
        assert len({part.row for part in parts}) == len(parts) <= rows
        assert sum(len(part.tokens) for part in parts) <= max(budget, rows)
        for part in parts:
            assert 0 < len(part.tokens) <= min(context, len(part.pages) * size)
            assert all(0 <= page < pages for page in part.pages)
            assert len(part.pages) <= shape.row_pages
    assert max(len(parts) for parts in steps) == rows
    whole = sum(len(part.tokens) for part in steps[0])
    assert whole == min(budget, context * rows) or whole >= (pages - rows) * size, "not the largest"
