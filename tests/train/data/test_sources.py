"""What a config names is opened, once tokenised, and by all ranks; what cannot be used says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echelon.parallel.loss import IGNORED
from echelon.train.config import Config, parse
from echelon.train.data.errors import DataError
from echelon.train.data.sequences import Masked
from echelon.train.data.source import Source, Sources
from echelon.train.data.sources import open_sources
from echelon.train.data.token_file import describe
from tests.train.data.texts import write_texts, write_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "gpt2", "vocabulary": 256, "context": 32},
    "llama": {"name": "llama3.2-1b", "vocabulary": 256, "context": 32},
    "bert": {"name": "bert-base", "vocabulary": 256, "context": 32},
    "vit": {"name": "vit-b16", "image": 32, "patch": 16, "classes": 5},
    "resnet": {"name": "resnet18", "classes": 5},
}


def config(model: str = "gpt", changes: dict[str, Any] | None = None, **data: Any) -> Config:
    return parse({"model": MODELS[model] | (changes or {}), "data": data})


def everything(source: Source | None) -> dict[str, torch.Tensor]:
    assert source is not None
    numbers = np.arange(len(source))
    return source.batch(numbers, numbers * 0)


@pytest.mark.parametrize("model", ["gpt", "llama", "bert"])
def test_text_is_split_into_windows(tmp_path: Path, model: str) -> None:
    paths = write_texts(tmp_path / "texts")
    sources = open_sources(
        config(model, kind="text", path=str(tmp_path / "texts"), held_out=0.1, masked=1.0), tmp_path / "cache"
    )
    text = b"".join(path.read_bytes() + b"\0" for path in paths)
    train, held_out = everything(sources.train), everything(sources.held_out)
    kept = train["targets_BS"].numel()
    targets = bytes(train["targets_BS"].flatten().tolist())
    if model == "bert":
        assert targets == text[:kept]
        assert bytes(held_out["targets_BS"].flatten().tolist()) in text[kept:]
        assert (train["tokens_BS"] == 255).float().mean() == pytest.approx(0.8, abs=0.03)
    else:
        assert targets == text[1 : kept + 1]
        assert bytes(train["tokens_BS"].flatten().tolist()) == text[:kept]
        assert bytes(held_out["tokens_BS"].flatten().tolist()) in text[kept + 1 :]
    assert len(sources.train) + held_out["tokens_BS"].shape[0] == (len(text) - 2) // 32


def test_what_is_trained_on_is_not_held_out(tmp_path: Path) -> None:
    [first, *_] = write_texts(tmp_path / "texts")
    with pytest.raises(DataError, match="would be trained on and held out at once"):
        open_sources(config(kind="text", path=str(tmp_path / "texts"), held_out_path=str(first)), tmp_path / "cache")


def test_text_is_tokenised_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    [first, *_] = write_texts(tmp_path / "others")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    wanted = config(
        kind="text", path=str(tmp_path / "texts"), held_out_path=str(first), tokenizer=str(tokenizer), length=8
    )
    wanted = parse({"model": MODELS["gpt"] | {"vocabulary": 400}, "data": vars(wanted.data)})
    cache = tmp_path / "cache"

    def made() -> list[int]:
        open_sources(wanted, cache)
        return [(cache / f"{name}.bin").stat().st_ino for name in ("train", "held-out")]

    before = made()
    assert made() == before
    os.utime(first, ns=(0, 0))
    touched = made()
    assert [old != new for old, new in zip(before, touched)] == [False, True]
    (tmp_path / "texts" / "more.txt").write_text("more")
    added = made()
    assert [old != new for old, new in zip(touched, added)] == [True, False]
    write_tokenizer(tmp_path / "tokenizer", vocabulary=290)
    assert all(old != new for old, new in zip(added, made()))
    assert sorted(path.name for path in cache.iterdir()) == ["held-out.bin", "held-out.json", "train.bin", "train.json"]


def test_a_description_without_its_file_is_made_again(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    wanted = config(kind="text", path=str(tmp_path / "texts"))
    open_sources(wanted, tmp_path)
    (tmp_path / "train.bin").unlink()
    assert len(open_sources(wanted, tmp_path).train) > 10


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_of_others(tmp_path: Path, dtype: str) -> None:
    np.arange(330).astype(dtype).tofile(tmp_path / "raw.bin")
    sources = open_sources(config(kind="tokens", path=str(tmp_path / "raw.bin"), dtype=dtype, held_out=0.2), tmp_path)
    assert (len(sources.train), len(sources.held_out or [])) == (8, 2)
    with pytest.raises(DataError, match=r"holds the token 2.., but the model's vocabulary ends at 255"):
        everything(sources.train)
    nothing_held_out = open_sources(
        config(kind="tokens", path=str(tmp_path / "raw.bin"), dtype=dtype, held_out=0), tmp_path
    )
    assert nothing_held_out.held_out is None
    assert len(nothing_held_out.train) == 10


def test_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"words": ["some words here"] * 50}).to_json(tmp_path / "rows.jsonl")
    wanted = config(kind="datasets", path=str(tmp_path / "rows.jsonl"), column="words")
    assert len(open_sources(wanted, tmp_path / "cache").train) == (50 * 16 - 2) // 32 - 1
    before = (tmp_path / "cache" / "train.bin").stat().st_ino
    open_sources(wanted, tmp_path / "cache")
    assert (tmp_path / "cache" / "train.bin").stat().st_ino == before


def test_the_token_that_hides_others(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")

    def mask(vocabulary: int, special: tuple[str, ...]) -> int:
        name = write_tokenizer(tmp_path / "tokenizer", 300, special)
        data = {"kind": "text", "path": str(tmp_path / "texts"), "tokenizer": str(name)}
        sources = open_sources(config("bert", {"vocabulary": vocabulary}, **data), tmp_path / "cache")
        assert isinstance(sources.train, Masked)
        return sources.train.mask

    assert mask(300, ("<s>", "[MASK]")) == 1
    assert mask(301, ("<s>",)) == 300
    with pytest.raises(DataError, match=r"no token for the mask.*set \[model\] vocabulary = 301"):
        mask(300, ("<s>",))


@pytest.mark.parametrize("model", MODELS)
def test_synthetic_samples_for_every_model(tmp_path: Path, model: str) -> None:
    sources = open_sources(config(model, kind="synthetic", samples=40, held_out=0.1), tmp_path)
    train, held_out = everything(sources.train), everything(sources.held_out)
    assert (len(sources.train), len(sources.held_out or [])) == (40, 4)
    if model in ("vit", "resnet"):
        side = 32 if model == "vit" else 224
        assert train["images_BCHW"].shape == (40, 3, side, side)
        assert train["targets_B"].max() < 5
    else:
        assert train["tokens_BS"].shape == train["targets_BS"].shape == (40, 32)
        rows = {*map(tuple, train["tokens_BS"].tolist())} | {*map(tuple, held_out["tokens_BS"].tolist())}
        assert len(rows) == 44
    if model == "bert":
        assert 0.05 < (train["targets_BS"] != IGNORED).float().mean() < 0.25


def image_folder(folder: Path, classes: int, each: int) -> Path:
    images = pytest.importorskip("PIL.Image")
    for number in range(classes):
        (folder / f"class{number}").mkdir(parents=True)
        for image in range(each):
            images.new("RGB", (40, 40), (number * 40, image, 0)).save(folder / f"class{number}" / f"{image}.png")
    return folder


def test_image_folders(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "all", 5, 10)
    sources = open_sources(config("vit", kind="images", path=str(folder), held_out=0.2), tmp_path)
    train, held_out = sources.train, sources.held_out
    assert {image.path for image in train.images}.isdisjoint(image.path for image in held_out.images)  # type: ignore
    assert len(train) + len(held_out or []) == 50
    assert everything(train)["images_BCHW"].shape == (len(train), 3, 32, 32)
    other = image_folder(tmp_path / "other", 2, 3)
    named = open_sources(config("vit", kind="images", path=str(folder), held_out_path=str(other)), tmp_path)
    assert (len(named.train), len(named.held_out or [])) == (50, 6)
    (other / "class9").mkdir()
    with pytest.raises(DataError, match=r"has classes that .*all has not: class9"):
        open_sources(config("vit", kind="images", path=str(folder), held_out_path=str(other)), tmp_path)
    few = image_folder(tmp_path / "few", 1, 3)
    with pytest.raises(DataError, match="has 3 images, too few to hold"):
        open_sources(config("vit", kind="images", path=str(few), held_out=1e-9), tmp_path)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("gpt", {"kind": "text", "path": "none"}, "there is no file or folder none"),
        ("gpt", {"kind": "tokens", "path": "none.bin"}, r"none\.bin cannot be read"),
    ],
)
def test_what_cannot_be_opened(tmp_path: Path, model: str, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_sources(config(model, **data), tmp_path)


def test_too_few_tokens_for_a_sample(tmp_path: Path) -> None:
    np.arange(60).astype(np.uint16).tofile(tmp_path / "few.bin")
    path = str(tmp_path / "few.bin")
    with pytest.raises(
        DataError, match="has 60 tokens, but one sample of 32 to train on and one that is held out need 66"
    ):
        open_sources(config(kind="tokens", path=path), tmp_path)
    assert len(open_sources(config(kind="tokens", path=path, held_out=0), tmp_path).train) == 1
    with pytest.raises(DataError, match="has 60 tokens, but one sample of 64 to train on need"):
        open_sources(config(kind="tokens", path=path, held_out=0, length=64), tmp_path)
    np.arange(900).astype(np.uint16).tofile(tmp_path / "more.bin")
    with pytest.raises(DataError, match="has 60 tokens, but one sample of 64 needs 65"):
        open_sources(config(kind="tokens", path=str(tmp_path / "more.bin"), held_out_path=path, length=64), tmp_path)


def test_a_vocabulary_that_the_model_has_not(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    small = {"vocabulary": 100}
    with pytest.raises(DataError, match="the tokenizer bytes has a vocabulary of 256, but gpt2 one of 100"):
        open_sources(config("gpt", small, kind="text", path=str(tmp_path / "texts")), tmp_path / "cache")
    open_sources(config("gpt", kind="text", path=str(tmp_path / "texts")), tmp_path / "cache")
    file = str(tmp_path / "cache" / "train.bin")
    with pytest.raises(DataError, match=r"train\.bin has a vocabulary of 256, but gpt2 one of 100"):
        open_sources(config("gpt", small, kind="tokens", path=file), tmp_path)


def opened_on_ranks(texts: str, cache: str) -> tuple[str, int, int]:
    """What a rank sees: an error, or how many samples, and their sum."""
    try:
        sources: Sources = open_sources(config(kind="text", path=texts), Path(cache))
    except DataError as error:
        return str(error), 0, 0
    dist.barrier()
    return "", len(sources.train), int(everything(sources.train)["tokens_BS"].sum())


def test_one_rank_tokenises_for_all(ranks: Any, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    told = ranks(3, opened_on_ranks, str(tmp_path / "texts"), str(tmp_path / "cache"))
    described = describe(tmp_path / "cache" / "train.bin")
    assert described is not None
    assert (
        told
        == [("", (described.tokens - 2) // 32 - max(1, round((described.tokens - 2) // 32 * 0.01)), told[0][2])] * 3
    )


def test_what_is_wrong_is_said_by_all_ranks(ranks: Any, tmp_path: Path) -> None:
    told = ranks(3, opened_on_ranks, "none", str(tmp_path / "cache"))
    assert told == [("there is no file or folder none", 0, 0)] * 3
