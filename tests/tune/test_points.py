"""What is measured: every shape of group that the world has, and only roads that are different and can be taken."""

from __future__ import annotations

import pytest

from echelon.comm.routes import OPERATIONS, Place
from echelon.tune.points import Point, Question, candidates, questions, shapes, sizes_of


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 0], [[0, 1]]),
        ([0, 0, 0, 0], [[0, 1], [0, 1, 2, 3]]),
        ([0, 0, 0, 0, 0, 0], [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]),
        ([0, 0, 1, 1], [[0, 1], [0, 2], [0, 1, 2, 3]]),
        ([0, 1, 0, 1], [[0, 2], [0, 1], [0, 1, 2, 3]]),
        ([0, 1], [[0, 1]]),
        ([0, 1, 2], [[0, 1, 2]]),
    ],
)
def test_shapes(nodes, expected):
    assert shapes(nodes) == expected


def test_every_operation_is_asked_for_and_reductions_in_two_precisions():
    asked = list(questions(4, 1, "cpu", OPERATIONS))
    assert {question.operation for question in asked} == set(OPERATIONS)
    assert {question.operation for question in asked if question.low} == {"all_reduce", "reduce", "reduce_scatter"}
    assert "barrier" not in {question.operation for question in questions(4, 1, "cuda", OPERATIONS)}
    assert [str(question) for question in questions(4, 2, "cpu", ("gather",))] == ["gather, 4 ranks on 2 nodes"]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (Question("all_reduce", 2, 1), "mpi gloo mpi+exchange gloo+exchange mpi+shared"),
        (Question("all_reduce", 2, 1, low=True), "mpi gloo mpi+shared"),
        (Question("reduce_scatter", 4, 2, low=True), "mpi gloo mpi+two-level gloo+two-level"),
        (Question("all_gather", 4, 1), "mpi gloo mpi+ring gloo+ring mpi+shared"),
        (Question("broadcast", 4, 2), "mpi gloo"),
        (Question("message", 4, 2), "mpi gloo"),
    ],
)  # fmt: skip
def test_candidates(question, expected):
    place = Place(question.ranks, question.nodes)
    assert " ".join(map(str, candidates(question, place))) == expected


def test_candidates_on_gpus():
    gather = Question("all_gather", 2, 1, "cuda")
    assert "nccl" in map(str, candidates(gather, Place(2, 1, own_gpus=True)))
    assert "nccl" not in map(str, candidates(gather, Place(2, 1)))


def test_sizes_that_give_every_rank_something():
    assert sizes_of(Question("all_gather", 4, 1), (4, 16, 64)) == [16, 64]
    assert sizes_of(Question("all_reduce", 4, 1), (4, 16, 64)) == [4, 16, 64]
    assert sizes_of(Question("barrier", 4, 1), (4, 16, 64)) == [0]


def test_a_point_is_read_as_it_is_written():
    point = Point(Question("reduce", 8, 2, "cuda", True), 4096)
    assert Point.from_data(point.to_data()) == point
