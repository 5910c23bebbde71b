"""Synthetic samples: made from their numbers alone, held-out ones are others, and there is something to learn."""

from __future__ import annotations

import numpy as np
import torch

from echelon.train.data.synthetic import SyntheticImages, SyntheticWindows

NUMBERS = np.arange(300)


def test_each_token_is_one_to_four_more() -> None:
    tokens = SyntheticWindows(0, 300, 64, 50).read(NUMBERS)
    assert tokens.shape == (300, 65)
    assert {*(np.diff(tokens) % 50).flatten().tolist()} == {1, 2, 3, 4}
    assert {*tokens.flatten().tolist()} == {*range(50)}


def test_a_sequence_depends_on_its_number_alone() -> None:
    windows, other = SyntheticWindows(0, 300, 64, 50), SyntheticWindows(300, 10, 64, 50)
    assert np.array_equal(windows.read(NUMBERS)[[7, 3]], windows.read(np.array([7, 3])))
    rows = np.concatenate([windows.read(NUMBERS), other.read(np.arange(10))])
    assert len({*map(tuple, rows.tolist())}) == 310


def test_images_of_a_class_are_alike() -> None:
    source = SyntheticImages(0, 300, classes=3, channels=3, side=30)
    given = source.batch(NUMBERS, NUMBERS * 0)
    images, targets = given["images_BCHW"], given["targets_B"]
    assert images.shape == (300, 3, 30, 30)
    assert {*targets.tolist()} == {0, 1, 2}
    means = torch.stack([images[targets == number].mean(0) for number in range(3)])
    nearest = ((images[:, None] - means) ** 2).flatten(2).sum(2).argmin(1)
    assert torch.equal(nearest, targets)


def test_an_image_depends_on_its_number_alone() -> None:
    source, other = SyntheticImages(0, 300, 3, 1, 8), SyntheticImages(300, 300, 3, 1, 8)
    whole = source.batch(NUMBERS, NUMBERS * 0)["images_BCHW"]
    assert torch.equal(whole[[7, 3]], source.batch(np.array([7, 3]), np.array([5, 5]))["images_BCHW"])
    assert not torch.equal(whole, other.batch(NUMBERS, NUMBERS * 0)["images_BCHW"])
