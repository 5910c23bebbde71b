"""Graphs and where they are cut, with a stand-in that says what is asked of CUDA; tests/gpu has the real ones."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.parallel.shards import Meeting
from echelon.serve.graphs import Captures, Graph


class Captured:
    """In place of a CUDA graph."""

    asked: list[str]
    is_open = False

    def capture_begin(self, **_: Any) -> None:
        Captured.is_open = True
        self.asked.append("begin")

    def capture_end(self) -> None:
        if not Captured.is_open:
            raise RuntimeError("nothing is being captured")
        Captured.is_open = False
        self.asked.append("end")

    def replay(self) -> None:
        self.asked.append("replay")


class Stream:
    def wait_stream(self, _: Any) -> None: ...


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Captured.asked, Captured.is_open = [], False
    for name, instead in (
        ("CUDAGraph", Captured),
        ("Stream", Stream),
        ("current_stream", Stream),
        ("graph_pool_handle", lambda: None),
        ("stream", nullcontext),
    ):
        monkeypatch.setattr(torch.cuda, name, instead)
    return Captured.asked


def test_a_graph_is_on_the_device_before_it_is_needed(asked: list[str]) -> None:
    graph = Graph(lambda: torch.ones(1), Captures(), None)
    assert asked == ["begin", "end", "replay"]
    assert graph.replay().tolist() == [1]
    assert asked[3:] == ["replay"]


def test_it_is_cut_where_ranks_meet(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: asked.append("exchange"))
    meeting = Meeting(None)  # type: ignore[arg-type]

    def compute() -> Tensor:
        meeting.sum(tensor := torch.ones(1))
        return tensor

    graph = Graph(compute, Captures(), meeting)
    graph.replay()
    once = ["replay", "exchange", "replay"]
    assert asked == ["begin", "end", "exchange", "begin", "end", *once, *once]


@pytest.mark.parametrize("where", ["captured", "exchanged"])
@pytest.mark.usefixtures("asked")
def test_what_fails_leaves_nothing_that_is_being_captured(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("on purpose")

    monkeypatch.setattr(dist, "all_reduce", fail)
    meeting = Meeting(None)  # type: ignore[arg-type]
    exchange = partial(meeting.sum, torch.ones(1))
    with pytest.raises(ValueError, match="on purpose"):
        Graph(fail if where == "captured" else exchange, Captures(), meeting)  # type: ignore[arg-type]
    assert not Captured.is_open
