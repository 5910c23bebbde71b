"""Hugging Face's datasets as documents: whatever the library reads, here from local files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.models.tokenizer import Bytes
from echelon.train.data.documents import of_dataset
from echelon.train.data.errors import DataError
from echelon.train.data.prepare import prepare
from echelon.train.data.token_file import open_tokens

TEXTS = [f"text number {number}: größer" for number in range(2500)]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv", "disk", "splits", "folder"])
def test_a_dataset_becomes_tokens(tmp_path: Path, library: Any, form: str) -> None:
    dataset = library.Dataset.from_dict({"text": TEXTS, "number": list(range(len(TEXTS)))})
    path = tmp_path / f"data.{form}"
    if form == "disk":
        dataset.save_to_disk(path)
    elif form == "splits":
        library.DatasetDict({"train": dataset}).save_to_disk(path)
    elif form == "folder":
        path.mkdir()
        dataset.to_parquet(path / "train.parquet")
    else:
        getattr(dataset, {"jsonl": "to_json", "parquet": "to_parquet", "csv": "to_csv"}[form])(path)
    documents = of_dataset(str(path), "train", "text")
    described = prepare(documents.pieces(), Bytes(), tmp_path / "out.bin", dtype="uint16")
    tokens, _ = open_tokens(tmp_path / "out.bin", "uint16")
    assert bytes(tokens.tolist()) == b"".join(text.encode() + b"\0" for text in TEXTS)
    assert described.documents == len(TEXTS)
    assert documents.bytes >= sum(map(len, TEXTS))


def test_another_column_is_another_input(tmp_path: Path, library: Any) -> None:
    rows = [{"text": "a", "other": None}, {"text": None, "other": "b"}]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    first, again, other = (of_dataset(str(tmp_path / "rows.json"), "train", name) for name in ("text", "text", "other"))
    assert [piece.read() for piece in first.pieces()] == [b"a"]
    assert first.fingerprint(Bytes()) == again.fingerprint(Bytes()) != other.fingerprint(Bytes())


def test_what_cannot_be_loaded(tmp_path: Path, library: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "number": 1}')
    with pytest.raises(DataError, match="has no column 'words': it has text, number"):
        of_dataset(str(tmp_path / "rows.jsonl"), "train", "words")
    with pytest.raises(DataError, match=r"the column 'number' of .* holds no text"):
        of_dataset(str(tmp_path / "rows.jsonl"), "train", "number")
    (tmp_path / "rows.xyz").write_text("?")
    with pytest.raises(DataError, match=r"rows\.xyz is none of \.json"):
        of_dataset(str(tmp_path / "rows.xyz"), "train", "text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"datasets cannot load .*empty"):
        of_dataset(str(tmp_path / "empty"), "train", "text")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: Any = None
    monkeypatch.setitem(sys.modules, "datasets", hidden)
    with pytest.raises(DataError, match="pip install datasets"):
        of_dataset("some/name", "train", "text")
