"""All ranks together see the samples of a step, whatever the layout; and the place in the data is one number."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echelon.parallel.layout import Layout
from echelon.parallel.loss import IGNORED
from echelon.train.data.loader import Loader
from echelon.train.data.order import Order
from tests.train.data.grids import Counted, grids

SOURCE = Counted(samples=50, length=8)
ALONE = grids()[0]


def step(place: int, batch: int, order: Order | None) -> Tensor:
    """The tokens of a whole step, as one process has them in one pass."""
    places = np.arange(place, place + batch)
    assert order is not None
    return SOURCE.batch(order[places], order.epochs(places))["tokens_BS"]


def put_together(passes: list[dict[str, Tensor]], into: Tensor, offset: int) -> None:
    """Write what a rank got to where its samples and positions stand in the step."""
    for given_ in passes:
        positions = given_.get("positions_S", torch.arange(into.shape[1]))
        samples = given_["samples_B"]
        name = "targets_BS" if offset else "tokens_BS"
        here = into[samples[:, None], positions]
        assert ((here == -1) | (here == given_[name] - offset)).all()
        into[samples[:, None], positions] = given_[name] - offset


@given(
    dp=st.sampled_from([1, 2, 3, 4]),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    micro=st.integers(1, 3),
    passes=st.integers(1, 3),
    place=st.integers(0, 500),
    kind=st.sampled_from(["ring", "ulysses"]),
    causal=st.booleans(),
)
def test_all_ranks_together_see_the_step(
    dp: int, cp: int, tp: int, micro: int, passes: int, place: int, kind: Any, causal: bool
) -> None:
    order, batch = Order(len(SOURCE), 1), dp * micro * passes
    tokens, targets = (torch.full((batch, SOURCE.length), -1) for _ in range(2))
    seen = 0
    for grid in grids(dp=dp, cp=cp, tp=tp):
        loader = Loader(SOURCE, order, grid, batch=batch, micro_batch=micro, kind=kind, causal=causal)
        mine = loader.load(place)
        loader.close()
        assert len(mine) == passes
        assert all(each["tokens_BS"].shape == (micro, SOURCE.length // cp) for each in mine)
        seen += sum(each["tokens_BS"].numel() for each in mine)
        put_together(mine, tokens, 0)
        put_together(mine, targets, 1)
    assert seen == tp * tokens.numel()
    assert torch.equal(tokens, step(place, batch, order))
    assert torch.equal(targets, tokens)


def test_a_pass_takes_the_samples_that_come_first() -> None:
    """So that passes, as the step, go through samples in their order."""
    loaders = [Loader(SOURCE, Order(50, 0), grid, batch=8, micro_batch=2) for grid in grids(dp=2)]
    numbers = [[each["samples_B"].tolist() for each in loader.load(0)] for loader in loaders]
    assert numbers == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    for loader in loaders:
        loader.close()


@given(before=st.integers(0, 12), batch=st.sampled_from([2, 6, 8]), seed=st.integers(0, 99))
def test_a_restart_goes_on_exactly(before: int, batch: int, seed: int) -> None:
    """Also with other ranks, and with other passes."""
    through = Loader(SOURCE, Order(50, seed), ALONE, batch=batch)
    for number in range(before):
        through.load(number * batch)
    again = [Loader(SOURCE, Order(50, seed), grid, batch=batch, micro_batch=1) for grid in grids(dp=2)]
    for number in range(before, before + 4):
        [expected] = through.load(number * batch)
        put = torch.full_like(expected["tokens_BS"], -1)
        for loader in again:
            put_together(loader.load(number * batch), put, 0)
        assert torch.equal(put, expected["tokens_BS"])
    for loader in (through, *again):
        loader.close()


def test_without_an_order_samples_come_once() -> None:
    """As numbered; what stands beyond the last does not count."""
    loader = Loader(Counted(5, 4), None, ALONE, batch=4)
    [[first], [second]] = loader.load(0), loader.load(4)
    loader.close()
    assert first["tokens_BS"][:, 0].tolist() == [0, 100, 200, 300]
    assert second["targets_BS"][0].tolist() == [401, 402, 403, 404]
    assert (second["targets_BS"][1:] == IGNORED).all()
    assert not (first["targets_BS"] == IGNORED).any()


class Failing(Counted):
    def batch(self, numbers: Any, epochs: Any) -> dict[str, Tensor]:
        if (numbers >= 4).any():
            raise OSError("the disk is gone")
        return super().batch(numbers, epochs)


def test_an_error_of_the_thread_is_raised_when_its_step_is_wanted() -> None:
    loader = Loader(Failing(8, 4), None, ALONE, batch=4)
    assert len(loader.load(0)) == 1
    loader.read_ahead()
    with pytest.raises(OSError, match="the disk is gone"):
        loader.load(4)
    loader.close()


class Watched(Counted):
    """Says which steps were read, and by which thread."""

    def batch(self, numbers: Any, epochs: Any) -> dict[str, Tensor]:
        READ.append((int(numbers[0]), threading.current_thread()))
        return super().batch(numbers, epochs)


READ: list[tuple[int, threading.Thread]] = []


def test_the_next_step_is_read_ahead_by_a_thread_that_ends() -> None:
    READ.clear()
    loader = Loader(Watched(100, 4), None, ALONE, batch=4)
    for place in (0, 4, 8, 40):
        loader.load(place)
        loader.read_ahead()
    loader.close()
    assert [place for place, _ in READ][:3] == [0, 4, 8]
    assert {place for place, _ in READ} <= {0, 4, 8, 12, 40, 44}
    [thread] = {thread for _, thread in READ}
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("batch", "micro", "message"),
    [
        (6, 0, "a batch of 6 cannot be dealt to dp=4: use a multiple of 4"),
        (0, 0, "a batch of 0 cannot be dealt"),
        (12, 2, "gives each of dp=4 3 samples, which do not divide into passes of micro_batch=2"),
    ],
)
def test_batches_that_cannot_be_dealt(batch: int, micro: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(SOURCE, None, grids(dp=4)[0], batch=batch, micro_batch=micro)


def on_ranks(degrees: dict[str, int], micro: int) -> list[tuple[list[int], list[int], list[list[int]]]]:
    """What a real rank gets of one step; computed there, since tensors do not travel back."""
    grid = Layout(**degrees).build()
    loader = Loader(SOURCE, Order(len(SOURCE), 1), grid, batch=8, micro_batch=micro)
    loader.load(40)
    passes = loader.load(48)
    loader.close()
    return [
        (each["samples_B"].tolist(), each.get("positions_S", torch.arange(8)).tolist(), each["tokens_BS"].tolist())
        for each in passes
    ]


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("degrees", [{"dp": 4}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}, {"dp": 4, "replicate": 2}])
def test_real_ranks_see_the_step(ranks: Any, degrees: dict[str, int], micro: int) -> None:
    tokens = torch.full((8, SOURCE.length), -1)
    for told in ranks(4, on_ranks, degrees, micro):
        passes = [
            {"samples_B": torch.tensor(samples), "positions_S": torch.tensor(positions), "tokens_BS": torch.tensor(of)}
            for samples, positions, of in told
        ]
        put_together(passes, tokens, 0)
    assert torch.equal(tokens, step(48, 8, Order(len(SOURCE), 1)))
