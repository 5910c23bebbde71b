"""Tokenizers: text comes back, their special tokens are found, and what is none says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.models.tokenizer import Bytes, TokenizerError, open_tokenizer
from tests.train.data.texts import WORDS, write_tokenizer

TEXT = " ".join(WORDS)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_bytes_come_back(text: str) -> None:
    tokens = Bytes().encode(text.encode())
    assert Bytes().decode(tokens.tolist()) == text
    assert not {Bytes().end, Bytes().mask} & {*tokens.tolist()}
    assert Bytes().decode([300, *tokens.tolist(), 256]) == text, "what is no byte, from a larger model, is left out"


def test_a_tokenizer_from_a_file_or_its_folder(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, special=("[PAD]", "<|endoftext|>", "[MASK]"))
    for name in (file, tmp_path):
        opened = open_tokenizer(str(name))
        tokens = opened.encode(TEXT.encode()).tolist()
        assert opened.decode(tokens) == TEXT
        assert len(tokens) < len(TEXT)
        assert max(tokens) < opened.vocabulary <= 400
        assert (opened.end, opened.mask) == (1, 2)
        assert opened.name == str(file)


def test_what_stands_beside_a_tokenizer_names_its_end(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, special=("<|endoftext|>", "<stop>"))
    before = open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    after = open_tokenizer(str(tmp_path))
    assert (before.end, after.end) == (0, 1)
    assert before.identity != after.identity


def test_a_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    opened = open_tokenizer(str(write_tokenizer(tmp_path, special=())))
    assert opened.end is None
    assert opened.mask is None


def test_what_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(TokenizerError, match=r"there is no tokenizer .*none: name a tokenizer\.json, a folder"):
        open_tokenizer(str(tmp_path / "none"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        open_tokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match="pip install tokenizers"):
        open_tokenizer(str(tmp_path))
