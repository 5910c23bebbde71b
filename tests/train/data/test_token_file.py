"""Files of tokens: what is written is read, held-out tokens are nobody else's, and a damaged file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.train.data.errors import DataError
from echelon.train.data.token_file import Description, FileWindows, describe, open_tokens, split, write_description


def written(folder: Path, count: int = 100, dtype: str = "uint16", **changes: object) -> Path:
    path = folder / "some.bin"
    np.arange(count).astype(dtype).tofile(path)
    told = {"dtype": dtype, "tokens": count, "vocabulary": 256, "tokenizer": "bytes", "documents": 1} | changes
    write_description(folder / "some.json", Description(**told))  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_file_with_its_description(tmp_path: Path, dtype: str) -> None:
    tokens, described = open_tokens(written(tmp_path, dtype=dtype), "uint16")
    assert tokens.tolist() == list(range(100))
    assert tokens.dtype == dtype
    assert described is not None
    assert described.vocabulary == 256


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_file_without_one(tmp_path: Path, dtype: str) -> None:
    (np.arange(10) + 60_000).astype(dtype).tofile(tmp_path / "raw.bin")
    tokens, described = open_tokens(tmp_path / "raw.bin", dtype)
    assert described is None
    assert tokens.tolist() == list(range(60_000, 60_010))


def test_windows_overlap_by_one_token() -> None:
    windows = FileWindows(np.arange(21, dtype=np.uint16), 5)
    assert len(windows) == 4
    assert windows.read(np.array([3, 0])).tolist() == [[15, 16, 17, 18, 19, 20], [0, 1, 2, 3, 4, 5]]
    assert len(FileWindows(np.arange(20, dtype=np.uint16), 5)) == 3
    assert len(FileWindows(np.arange(0, dtype=np.uint16), 5)) == 0


@given(tokens=st.integers(0, 300), length=st.integers(1, 40), share=st.floats(0.001, 0.9))
def test_no_held_out_token_is_trained_on(tokens: int, length: int, share: float) -> None:
    train, held_out = split(np.arange(tokens, dtype=np.uint16), length, share)
    assert held_out is not None
    if tokens < 2 * length + 2:  # one sample each
        assert len(train) == 0
        return
    seen = [{*windows.read(np.arange(len(windows))).flatten().tolist()} for windows in (train, held_out)]
    assert not seen[0] & seen[1]
    assert max(seen[0], default=-1) < min(seen[1])
    total = (tokens - 2) // length
    assert len(train) + len(held_out) == total
    assert len(held_out) == max(1, round(total * share))


def test_nothing_is_held_out_unless_wanted() -> None:
    train, held_out = split(np.arange(11, dtype=np.uint16), 5, 0)
    assert len(train) == 2
    assert held_out is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 99}, "has 200 bytes, which are not 99 tokens of uint16: was it cut off"),
        ({"format": 2}, "has format 2, and this version of Echelon reads 1"),
        ({"dtype": "int8"}, "has dtype 'int8', which is none of uint16, uint32"),
    ],
)
def test_descriptions_that_do_not_fit(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = written(tmp_path)
    beside = tmp_path / "some.json"
    beside.write_text(json.dumps(json.loads(beside.read_text()) | changes))
    with pytest.raises(DataError, match=message):
        open_tokens(path, "uint16")


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "what": 2}'])
def test_what_is_no_description(tmp_path: Path, text: str) -> None:
    path = written(tmp_path)
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(DataError, match="describes no file of tokens"):
        describe(path)


def test_what_is_no_file_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.bin cannot be read: No such file"):
        open_tokens(tmp_path / "none.bin", "uint16")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="has 3 bytes, which are not whole tokens of uint16"):
        open_tokens(tmp_path / "odd.bin", "uint16")
