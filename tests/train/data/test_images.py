"""Folders of images: classes by name, cuts by hash, held-out images on their side for good."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.train.data import images
from echelon.train.data.errors import DataError
from echelon.train.data.images import Image, ImageFolder, find_classes, find_images, middle, random_cut, split

pytest.importorskip("PIL")
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine images a class, each of one colour."""
    for name, colour in COLOURS.items():
        (tmp_path / name).mkdir()
        for number in range(9):
            suffix = ("png", "JPG", "bmp")[number % 3]
            images.pillow().new("RGB", (40 + number, 30), colour).save(tmp_path / name / f"{number}.{suffix}")
        (tmp_path / name / "notes.txt").write_text("no image")
    return tmp_path


def opened(folder: Path, seed: int | None = 0, side: int = 16, channels: int = 3) -> ImageFolder:
    return ImageFolder(find_images(folder, find_classes(folder, 10)), side, channels, seed)


def test_classes_are_numbered_by_name(folder: Path) -> None:
    source = opened(folder)
    numbers = np.array([0, 26, 9])
    given_ = source.batch(numbers, numbers * 0)
    assert len(source) == 27
    assert given_["images_BCHW"].shape == (3, 3, 16, 16)
    assert given_["targets_B"].tolist() == [0, 2, 1]
    strongest = given_["images_BCHW"].mean((2, 3)).argmax(1)
    assert strongest.tolist() == [2, 0, 1]


def test_pixels_are_normalised(folder: Path) -> None:
    [image] = opened(folder, None).batch(np.array([18]), np.array([0]))["images_BCHW"]
    expected = (torch.tensor([1.0, 0.0, 0.0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    assert torch.allclose(image.mean((1, 2)), expected, atol=0.02)


def test_grey_images_for_a_model_of_one_channel(folder: Path) -> None:
    assert opened(folder, channels=1).batch(np.array([3]), np.array([0]))["images_BCHW"].shape == (1, 1, 16, 16)
    with pytest.raises(DataError, match="images have 1 or 3 channels, but"):
        images.check_channels(4)


@pytest.fixture
def gradient(tmp_path: Path) -> Path:
    """One image in which each pixel tells where it stands."""
    (tmp_path / "one").mkdir()
    rows, columns = np.mgrid[0:60, 0:80]
    pixels = np.stack([rows * 4, columns * 3, rows * 0], -1).astype(np.uint8)
    images.pillow().fromarray(pixels).save(tmp_path / "one" / "0.png")
    return tmp_path


def test_cuts_are_a_hash_of_seed_epoch_and_sample(gradient: Path) -> None:
    def read(seed: int | None, epoch: int) -> torch.Tensor:
        return opened(gradient, seed).batch(np.array([0]), np.array([epoch]))["images_BCHW"]

    assert torch.equal(read(0, 0), read(0, 0))
    assert not torch.equal(read(0, 0), read(0, 1))
    assert not torch.equal(read(0, 0), read(1, 0))
    assert torch.equal(read(None, 0), read(None, 1))


def test_half_of_the_cuts_are_mirrored(gradient: Path) -> None:
    """Columns then count down."""
    cuts = opened(gradient).batch(np.zeros(200, np.int64), np.arange(200))["images_BCHW"]
    mirrored = (cuts[:, 1, :, 0] > cuts[:, 1, :, -1]).all(1)
    assert 0.4 < mirrored.float().mean() < 0.6


def test_the_middle() -> None:
    assert middle((100, 80)) == (15, 5, 85, 75)


@given(st.integers(1, 5000), st.integers(1, 5000), st.lists(st.floats(0, 1, exclude_max=True), min_size=5, max_size=5))
def test_a_cut_lies_inside(width: int, height: int, chances: list[float]) -> None:
    (left, upper, right, lower), _ = random_cut((width, height), chances)
    assert 0 <= left < right <= width + 1e-6
    assert 0 <= upper < lower <= height + 1e-6


@given(st.floats(0, 1))
def test_a_split_divides(share: float) -> None:
    everything = [Image(Path(f"/a/class/{number}.png"), 0) for number in range(100)]
    train, held_out = split(everything, Path("/a"), share)
    assert sorted([*train, *held_out], key=str) == sorted(everything, key=str)
    assert abs(len(held_out) - 100 * share) < 20


def test_an_image_stays_on_its_side() -> None:
    everything = [Image(Path(f"/a/class/{number}.png"), 0) for number in range(100)]
    _, few = split(everything[::3], Path("/a"), 0.3)
    _, more = split([Image(Path("/b") / image.path.relative_to("/a"), 0) for image in everything], Path("/b"), 0.3)
    assert {image.path.name for image in few} == {image.path.name for image in more} & {
        image.path.name for image in everything[::3]
    }


def test_an_image_that_cannot_be_read(folder: Path) -> None:
    (folder / "blue" / "0.png").write_bytes(b"not an image")
    whole = (folder / "blue" / "3.png").read_bytes()
    (folder / "blue" / "3.png").write_bytes(whole[: len(whole) - 30])
    source = opened(folder)
    for number, name in ((0, r"0\.png"), (3, r"3\.png")):
        with pytest.raises(DataError, match=f"blue/{name} cannot be read as an image"):
            source.batch(np.array([number, 5]), np.array([0, 0]))
    source.batch(np.array([5]), np.array([0]))


def test_folders_that_are_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        find_classes(folder / "none", 3)
    with pytest.raises(DataError, match="has no folders of classes: images are in FOLDER/CLASS/"):
        find_classes(folder / "red", 3)
    with pytest.raises(DataError, match=r"has 3 classes, but the model 2: set \[model\] classes = 3"):
        find_classes(folder, 2)
    (folder / "red" / "empty").mkdir()
    with pytest.raises(DataError, match="hold no images"):
        find_images(folder / "red", {"empty": 0})
    hidden: Any = None
    monkeypatch.setitem(sys.modules, "PIL", hidden)
    with pytest.raises(DataError, match="pip install pillow"):
        images.pillow()
