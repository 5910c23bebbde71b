"""The geometry of checkpoints."""

from __future__ import annotations

import math
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from echelon.train.boxes import Box, Dealer, boxes

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def places(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Where a box's elements lie in the flattened tensor, in the box's own order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True)]
    return [sum(i * stride for i, stride in zip(place, strides, strict=True)) for place in product(*ranges)]


@given(SHAPES, st.data())
def test_boxes_are_the_range(shape, data):
    """All of it, in its order, with nothing twice."""
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    found = boxes(shape, start, stop)
    assert [place for box in found for place in places(box, shape)] == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert all(math.prod(box.sizes) for box in found)


def test_three_boxes_of_a_matrix():
    assert boxes((4, 5), 3, 16) == [Box((0, 3), (1, 2)), Box((1, 0), (2, 5)), Box((3, 0), (1, 1))]


def test_at_origin():
    assert Box((1, 0), (2, 5)).at((10, 20)) == Box((11, 20), (2, 5))


@given(st.lists(st.tuples(st.integers(1, 100), st.sampled_from([1, 2, 4]))))
def test_dealer(tensors):
    """The shares of those who hold the same differ by one tensor at most, and all ranks agree."""
    one, other = Dealer(), Dealer()
    shares = {holders: [0] * holders for _, holders in tensors}
    for size, holders in tensors:
        chosen = one.deal(size, holders)
        assert chosen == other.deal(size, holders)
        shares[holders][chosen] += size
    for holders, share in shares.items():
        assert max(share) - min(share) <= max(size for size, among in tensors if among == holders)
