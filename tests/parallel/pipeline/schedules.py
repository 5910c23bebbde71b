"""Schedules for tests: a grid of them, and any of them for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from echelon.parallel.pipeline.schedule import SCHEDULES, Schedule, make

ONE_WAY = [name for name in SCHEDULES if name not in ("gems", "gems-gpipe", "chimera")]
SYNCHRONOUS = [name for name in SCHEDULES if not name.startswith("pipedream")]


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES)) -> Schedule:
    """Any schedule of up to 8 ranks and some 20 microbatches."""
    name = draw(st.sampled_from(names))
    ranks = draw(st.integers(1, 4)) * 2 if name == "chimera" else draw(st.integers(1, 8))
    if name in ("interleaved", "pipedream-2bw"):
        microbatches = ranks * draw(st.integers(1, max(20 // ranks, 1)))
    else:
        microbatches = draw(st.integers(1, 20))
    return make(name, ranks, microbatches, chunks=draw(st.integers(2, 4)) if name == "interleaved" else 1)
