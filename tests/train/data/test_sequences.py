"""What a model is asked: the next token, or tokens that were hidden, the same ones wherever one looks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echelon.parallel.loss import IGNORED
from echelon.train.data.errors import DataError
from echelon.train.data.sequences import Masked, NextToken
from echelon.train.data.token_file import FileWindows

VOCABULARY, MASK = 90, 99
WINDOWS = FileWindows(np.arange(20_001, dtype=np.uint16) % VOCABULARY, 100)
ALL = np.arange(200)
MASKED = Masked(WINDOWS, 100, MASK, 0.15, seed=3)


def test_targets_are_the_tokens_that_follow() -> None:
    given = NextToken(WINDOWS, VOCABULARY).batch(np.array([7, 2]), np.array([0, 5]))
    assert given["tokens_BS"].shape == given["targets_BS"].shape == (2, 100)
    assert given["tokens_BS"][0, :3].tolist() == [700 % 90, 701 % 90, 702 % 90]
    assert torch.equal(given["tokens_BS"][:, 1:], given["targets_BS"][:, :-1])
    assert given["targets_BS"][:, -1].tolist() == [800 % 90, 300 % 90]


def test_what_is_hidden_is_asked_for_and_nothing_else() -> None:
    given = MASKED.batch(ALL, ALL * 0)
    tokens, targets, whole = given["tokens_BS"], given["targets_BS"], torch.from_numpy(WINDOWS.read(ALL)[:, :-1])
    asked = targets != IGNORED
    assert torch.equal(targets[asked], whole[asked])
    assert torch.equal(tokens[~asked], whole[~asked])
    shares = {
        "asked": asked.float().mean(),
        "mask": (tokens[asked] == MASK).float().mean(),
        "same": (tokens[asked] == whole[asked]).float().mean(),
    }
    assert shares == {
        "asked": pytest.approx(0.15, abs=0.01),
        "mask": pytest.approx(0.8, abs=0.03),
        "same": pytest.approx(0.1, abs=0.03),
    }


def test_a_sample_is_masked_alike_in_any_company() -> None:
    whole = MASKED.batch(ALL, ALL % 3)
    some = np.array([150, 3, 77])
    part = MASKED.batch(some, some % 3)
    assert all(torch.equal(part[name], whole[name][some]) for name in whole)


def test_epochs_seeds_and_samples_are_masked_otherwise() -> None:
    def asked(source: Masked, number: int, epoch: int) -> list[bool]:
        return (source.batch(np.array([number]), np.array([epoch]))["targets_BS"][0] != IGNORED).tolist()

    here = asked(MASKED, 4, 0)
    assert here == asked(MASKED, 4, 0)
    others = asked(MASKED, 4, 1), asked(MASKED, 5, 0), asked(Masked(WINDOWS, 100, MASK, 0.15, seed=4), 4, 0)
    assert all(other != here for other in others)


def test_a_token_beyond_the_vocabulary() -> None:
    tokens = np.arange(21, dtype=np.uint16)
    tokens[17] = 500
    source = NextToken(FileWindows(tokens, 10), 50)
    source.batch(np.array([0]), np.array([0]))
    with pytest.raises(DataError, match="sample 1 holds the token 500, but the model's vocabulary ends at 49"):
        source.batch(np.array([0, 1]), np.array([0, 0]))
