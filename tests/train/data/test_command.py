"""`echelon data prepare` and `echelon data show`, as a user types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from echelon.train.data.command import data_app
from tests.train.data.texts import write_texts, write_tokenizer


def run(*arguments: object) -> tuple[int, str, str]:
    ended = CliRunner().invoke(data_app, [*map(str, arguments)])
    return ended.exit_code, ended.stdout, ended.stderr


def test_prepare_and_show(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "texts" / "picture").write_bytes(b"\xff\xfe")
    tokenizer, out = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "some.bin"
    code, told, aside = run("prepare", tmp_path / "texts", "--out", out, "--tokenizer", tokenizer, "--workers", 2)
    assert code == 0, aside
    tokens = out.stat().st_size // 2
    assert told.startswith(f"12 documents, {tokens:,} tokens (uint16, vocabulary 3")
    assert f"in {out}: " in told
    assert told.endswith(" tokens/s\n")
    assert "passing over 1 files that are empty or no UTF-8 text, such as" in aside
    code, told, _ = run("show", out)
    assert code == 0
    assert f"{tokens:,} tokens of uint16" in told
    assert "12 documents, vocabulary 3" in told
    first = (tmp_path / "texts" / "0" / "text0.txt").read_text("utf-8")
    assert first[:60] in told


def test_a_file_without_description_is_shown_as_numbers_or_decoded(tmp_path: Path) -> None:
    np.frombuffer(b"hello [bold] world", np.uint8).astype(np.uint32).tofile(tmp_path / "raw.bin")
    _, told, _ = run("show", tmp_path / "raw.bin", "--dtype", "uint32")
    assert "104 101 108 108 111" in told
    _, told, _ = run("show", tmp_path / "raw.bin", "--dtype", "uint32", "--tokenizer", "bytes")
    assert "hello [bold] world" in told
    np.array([7, 70_000], np.uint32).tofile(tmp_path / "large.bin")
    _, told, aside = run("show", tmp_path / "large.bin", "--dtype", "uint32", "--tokenizer", "bytes")
    assert "7 70000" in told
    assert "its tokens are not those of bytes: 70000 is beyond its 256" in aside


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "none", "--out", "out.bin"], "there is no file or folder none"),
        (["prepare", "texts", "--out", "out.txt"], "the name of a file of tokens ends in .bin"),
        (["prepare", "texts", "--out", "none/out.bin"], "there is no folder none"),
        (["prepare", "texts", "--out", "out.bin", "--tokenizer", "none"], "there is no tokenizer none"),
        (["prepare", "empty", "--out", "out.bin"], "there is no text in empty"),
        (["prepare", "a", "b", "--kind", "datasets", "--out", "out.bin"], "one dataset at a time, and not a, b"),
        (["show", "none.bin"], "none.bin cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts", files=1)
    (tmp_path / "empty").mkdir()
    code, told, aside = run(*arguments)
    assert code == 1
    assert message in aside
    assert not told
    assert not [*tmp_path.glob("out*")]


def test_the_commands_import_nothing_heavy() -> None:
    script = "import sys, echelon.train.data.command; print([m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_workers_need_no_torch() -> None:
    """It would take them seconds to begin."""
    script = "import sys, echelon.train.data.prepare; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
