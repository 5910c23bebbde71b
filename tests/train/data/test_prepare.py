"""Text becomes the same file whatever the number of processes, or no file at all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.models.tokenizer import Bytes
from echelon.train.data import prepare as module
from echelon.train.data.documents import of_files
from echelon.train.data.errors import DataError
from echelon.train.data.prepare import Piece, TextPiece, file_pieces, fitting_dtype, prepare, useful_workers
from echelon.train.data.token_file import open_tokens
from echelon.train.data.tokenizer import open_tokenizer
from tests.train.data.texts import write_texts, write_tokenizer


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 300)
    monkeypatch.setattr(module, "_LINE", 100)


def test_bytes_of_documents_with_a_zero_after_each(tmp_path: Path) -> None:
    paths = write_texts(tmp_path / "texts")
    described = prepare(of_files([str(tmp_path / "texts")]).pieces(), Bytes(), tmp_path / "out.bin", dtype="uint16")
    tokens, beside = open_tokens(tmp_path / "out.bin", "uint16")
    assert tokens.astype(np.uint8).tobytes() == b"".join(path.read_bytes() + b"\0" for path in paths)
    assert described == beside
    assert (described.documents, described.tokens) == (12, len(tokens))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.json", "texts"]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_number_of_workers_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Of many small documents and one that is cut into several pieces, for want of lines also between letters."""
    monkeypatch.setattr(module, "PIECE", 100_000)
    write_texts(tmp_path / "texts")
    (tmp_path / "texts" / "large").write_text("größer 👋 42\n" * 8_000 + "ö " * 100_000 + "\n" + "a b\n" * 9, "utf-8")
    tokenizer, documents = open_tokenizer(str(write_tokenizer(tmp_path / "t"))), of_files([str(tmp_path / "texts")])
    assert documents.bytes > 3 * module.PIECE
    files = []
    for workers in (1, 2, 3):
        out = tmp_path / f"{workers}.bin"
        described = prepare(documents.pieces(), tokenizer, out, dtype=dtype, workers=workers)
        files.append((out.read_bytes(), described))
    assert files[0] == files[1] == files[2]
    tokens, _ = open_tokens(tmp_path / "1.bin", dtype)
    texts = [path.read_text("utf-8") for path in documents.paths]
    assert tokenizer.decode(tokens[tokens != tokenizer.end].tolist()) == "".join(texts)
    assert (tokens == tokenizer.end).sum() == described.documents == 13


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("line", [3, 90, 10_000])
def test_pieces_are_cut_between_lines_or_else_letters(tmp_path: Path, line: int) -> None:
    file = tmp_path / "text"
    file.write_text(("é" * line + "\n") * (20_000 // line), encoding="utf-8")
    size = file.stat().st_size
    parts = [piece.read() for piece in file_pieces(file, size)]
    assert b"".join(parts) == file.read_bytes()
    assert [part.decode() for part in parts]
    assert all(len(part) <= module.PIECE + module._LINE + 2 for part in parts)
    if line < 50:
        assert all(part.endswith(b"\n") for part in parts)


@given(st.binary(max_size=2000))
def test_pieces_of_anything_are_all_of_it(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "anything"
    file.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 50)
        patch.setattr(module, "_LINE", 20)
        parts = [piece.read() for piece in file_pieces(file, len(content))]
    assert b"".join(parts) == content


def test_progress_adds_up(tmp_path: Path) -> None:
    write_texts(tmp_path)
    documents, told = of_files([str(tmp_path)]), []
    prepare(documents.pieces(), Bytes(), tmp_path / "out.bin", dtype="uint16", done=told.append)
    assert sum(told) == documents.bytes


def failing(error: BaseException) -> Iterator[Piece]:
    yield TextPiece("x" * module.PIECE)
    raise error


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyboardInterrupt(), DataError("no")], ids=repr)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_leaves_nothing_and_what_was_there_stays(tmp_path: Path, error: BaseException, workers: int) -> None:
    out = tmp_path / "out.bin"
    prepare([TextPiece("before")], Bytes(), out, dtype="uint16")
    before = out.read_bytes(), (tmp_path / "out.json").read_bytes()
    with pytest.raises(type(error)):
        prepare(failing(error), Bytes(), out, dtype="uint16", workers=workers)
    assert (out.read_bytes(), (tmp_path / "out.json").read_bytes()) == before
    assert len([*tmp_path.iterdir()]) == 2


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    [path] = write_texts(tmp_path, files=1)
    pieces = [*of_files([str(path)]).pieces()]
    path.unlink()
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"text0\.txt cannot be read: No such file"):
            prepare(pieces, Bytes(), tmp_path / "out.bin", dtype="uint16", workers=workers)
    assert not [*tmp_path.glob("out*")]


def test_what_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"text": "hello"}')
    for name, message in {
        "mine.bin": r"mine\.json would be replaced, and is not ours",
        "mine.txt": r"the name of a file of tokens ends in \.bin",
        "none/mine.bin": "there is no folder .*none",
    }.items():
        with pytest.raises(DataError, match=message):
            prepare([TextPiece("x")], Bytes(), tmp_path / name, dtype="uint16")
    assert json.loads((tmp_path / "mine.json").read_text()) == {"text": "hello"}


def test_dtypes_fit_vocabularies() -> None:
    class Large(Bytes):
        vocabulary = 70_000

    assert fitting_dtype(Bytes()) == "uint16"
    assert fitting_dtype(Bytes(), "uint32") == "uint32"
    assert fitting_dtype(Large()) == "uint32"
    with pytest.raises(DataError, match="uint16 cannot hold a vocabulary of 70000: use uint32"):
        fitting_dtype(Large(), "uint16")


def test_processes_only_where_they_are_worth_it(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path)))
    assert useful_workers(10**12, Bytes()) == useful_workers(10**6, tokenizer) == 1
    assert useful_workers(10**12, tokenizer) == os.cpu_count()


COMMAND = "from echelon.train.data.command import data_app; data_app()"


def test_a_disk_without_room_leaves_nothing(tmp_path: Path) -> None:
    """A limit of the system on the size of a file fails as a full disk does: in the middle of writing."""
    write_texts(tmp_path / "texts", lines=400)
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999)); {COMMAND}"
    arguments = ["prepare", str(tmp_path / "texts"), "--out", str(tmp_path / "out.bin")]
    ended = subprocess.run([sys.executable, "-c", limited, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "out.bin cannot be written: File too large" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """Sent to all processes of the job, as Ctrl-C does, once the file has been begun; the documents never end."""
    write_texts(tmp_path / "texts", files=1)
    (tmp_path / "out").mkdir()
    endless = (
        "import echelon.train.data.prepare as p, echelon.train.data.documents as d;"
        "d.Files.pieces = lambda self: (p.TextPiece('word ' * 100000) for _ in iter(int, 1));"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"  # even where tests run in background
    )
    arguments = ["prepare", str(tmp_path / "texts"), "--out", str(tmp_path / "out" / "a.bin"), "--workers", "2"]
    command = [sys.executable, "-c", endless + COMMAND, *arguments]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as job:
        try:
            while job.poll() is None and not any(path.stat().st_size for path in (tmp_path / "out").iterdir()):
                time.sleep(0.01)
            os.killpg(job.pid, sent)
            _, told = job.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == code, told
    assert "Traceback" not in told
    assert not [*(tmp_path / "out").iterdir()]
