"""The documents that a user names: always in the same order, and only text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.train.data.errors import DataError
from echelon.train.data.files import find
from tests.train.data.texts import write_texts


def test_a_folder_is_searched_in_the_order_of_paths(tmp_path: Path) -> None:
    paths = write_texts(tmp_path)
    assert find([str(tmp_path)]) == paths
    assert find([str(tmp_path / "**" / "*.txt")]) == paths
    assert find([str(paths[3]), str(paths[1])]) == [paths[3], paths[1]]


def test_what_is_no_text_is_passed_over(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, files=2)
    (tmp_path / "empty").touch()
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\xff\xfe")
    (tmp_path / "nul").write_bytes(b"a\0b")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "made").write_text("made")
    os.symlink(tmp_path / "gone", tmp_path / "link")
    passed: list[Path] = []
    assert find([str(tmp_path)], passed.append) == paths
    assert [path.name for path in passed] == ["empty", "link", "nul", "picture"]


def test_a_letter_may_be_cut_where_one_stops_looking(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 8191 + "ö" * 10, encoding="utf-8")
    assert find([str(tmp_path)])


def test_the_standard_library(tmp_path: Path) -> None:
    found = find(["python"])
    assert len(found) > 300
    assert os.__file__ in map(str, found)
    assert all(path.suffix == ".py" for path in found)
    assert not [path for path in found if {"site-packages", "test"} & {*path.parts[-4:]}]


def test_what_cannot_be_found(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder .*none"):
        find([str(tmp_path / "none")])
    with pytest.raises(DataError, match="there is no text in"):
        find([str(tmp_path)])
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="binary is not UTF-8 text"):
        find([str(tmp_path / "binary")])
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty is empty"):
        find([str(tmp_path / "empty")])
