"""The order of samples: each epoch a shuffle of all, the same from wherever one looks at it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.train.data.order import Order

LENGTHS = st.integers(1, 400)
SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**31)


@given(LENGTHS, SEEDS, EPOCHS)
def test_each_epoch_has_each_sample_once(length: int, seed: int, epoch: int) -> None:
    numbers = Order(length, seed)[epoch * length : (epoch + 1) * length]
    assert sorted(numbers) == list(range(length))


@given(LENGTHS, SEEDS, st.data())
def test_slices_agree_with_each_other(length: int, seed: int, data: Any) -> None:
    order, end = Order(length, seed), 3 * length
    first, last = sorted(data.draw(st.tuples(st.integers(0, end), st.integers(0, end))))
    assert np.array_equal(order[first:last], order[0:end][first:last])
    places = np.array(data.draw(st.lists(st.integers(0, end - 1))), np.int64)
    assert np.array_equal(order[places], order[0:end][places])
    assert np.array_equal(order.epochs(places), places // length)


@given(st.integers(16, 400), SEEDS, EPOCHS)
def test_epochs_and_seeds_differ(length: int, seed: int, epoch: int) -> None:
    here = Order(length, seed)[epoch * length : (epoch + 1) * length]
    assert not np.array_equal(here, Order(length, seed)[(epoch + 1) * length : (epoch + 2) * length])
    assert not np.array_equal(here, Order(length, seed + 1)[epoch * length : (epoch + 1) * length])
    assert not np.array_equal(here, np.arange(length))


def test_every_sample_comes_everywhere() -> None:
    """Of 20,000 shuffles of six, each pair of place and sample is as frequent as it should be: by chi-squared,
    whose value for 25 degrees of freedom is beyond 60 less than once in 10,000 times.
    """
    shuffles = Order(6, 7)[0 : 6 * 20_000].reshape(-1, 6)
    counts = np.stack([np.bincount(shuffles[:, place], minlength=6) for place in range(6)])
    expected = 20_000 / 6
    assert ((counts - expected) ** 2 / expected).sum() * 5 / 6 < 60


def test_neighbours_part() -> None:
    """What stood side by side does so no more often than chance has it: once in half the length."""
    numbers = Order(10_000, 3)[0:10_000]
    assert (abs(np.diff(numbers)) == 1).sum() < 15


def test_a_trillion_samples_need_no_list() -> None:
    order = Order(10**12, 0)
    numbers = order[10**15 : 10**15 + 1000]
    assert len({*numbers.tolist()}) == 1000
    assert 0 <= numbers.min() < 10**11
    assert 9 * 10**11 < numbers.max() < 10**12


def test_there_is_at_least_one_sample() -> None:
    with pytest.raises(ValueError, match="an order of 0 samples"):
        Order(0, 0)
