"""Records on disk: what is written is read, also from a rank that was killed."""

from __future__ import annotations

import dataclasses
import sys
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from echelon.comm import records
from echelon.comm.records import Record, RecordWriter, now, read
from tests.launch.jobs import ROOT, SCRIPTS, echelon, run

times = st.integers(1, 2**62)
some_records = st.builds(
    Record,
    operation=st.sampled_from(["all_reduce", "send", "Straße"]),
    group=st.text(max_size=4),
    dimension=st.sampled_from(["", "world", "dp"]),
    ranks=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", ""]),
    payload=st.integers(0, 2**62),
    enqueued=times,
    peer=st.none() | st.integers(-1, 9),
    wire=st.integers(0, 2**62),
    modelled=st.booleans(),
    ended=st.just(0) | times,
    blocked=st.integers(0, 2**40),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(some_records), st.lists(times, max_size=3))
def test_what_is_written_is_read(tmp_path_factory, written, steps):
    folder = tmp_path_factory.mktemp("records")
    writer = RecordWriter(folder, 3, 4)
    for record in written:
        writer.append(record)
    writer.steps.extend(steps)
    writer.close()
    assert list(read(folder)) == [3]
    log = read(folder)[3]
    assert list(log) == sorted(written, key=lambda record: record.enqueued)
    assert log.steps == steps


def test_what_is_under_way_is_written_when_it_is_over(tmp_path):
    writer = RecordWriter(tmp_path, 0, 1)
    slow, quick = (Record("all_reduce", "0", "", (0,), "", 4, now()) for _ in range(2))
    writer.append(slow)
    writer.append(quick)
    quick.ended = now()
    writer.flush(now() + 1)
    assert len(read(tmp_path)[0]) == 1
    slow.ended, slow.blocked = now(), 7
    writer.flush(now() + 1)
    assert [record.blocked for record in read(tmp_path)[0]] == [7, 0]
    writer.close()


def test_a_torn_row_is_left_out(tmp_path):
    writer = RecordWriter(tmp_path, 0, 1)
    for _ in range(2):
        writer.append(Record("all_reduce", "0", "", (0,), "", 4, now(), ended=now()))
    writer.close()
    rows = tmp_path / "rank-0.rows"
    rows.write_bytes(rows.read_bytes()[:-9])
    assert len(read(tmp_path)[0]) == 1


def test_another_version(tmp_path, monkeypatch):
    RecordWriter(tmp_path, 0, 1).close()
    monkeypatch.setattr(records, "_COLUMNS", ["another"])
    with pytest.raises(ValueError, match="another version"):
        read(tmp_path)


def test_reading_needs_no_torch(tmp_path):
    RecordWriter(tmp_path, 0, 1).close()
    code = f"import pathlib, sys; from echelon.comm.records import read; read(pathlib.Path({str(tmp_path)!r})); "
    assert run(sys.executable, "-c", code + "print('torch' in sys.modules)").stdout.split() == ["False"]


def test_every_field_is_kept():
    assert {field.name for field in dataclasses.fields(Record)} == set(records._COLUMNS)


def test_run_with_record(tmp_path):
    folder = tmp_path / "new"
    assert echelon("run", "-n", 2, "--record", folder, SCRIPTS / "ddp.py", "echelon").returncode == 0
    logs = read(folder)
    assert list(logs) == [0, 1]
    assert [record.operation for record in logs[0]] == [record.operation for record in logs[1]]
    assert sum(record.operation == "all_reduce" for record in logs[0]) >= 3
    assert len(logs[0].steps) == 3
    again = echelon("run", "-n", 2, "--record", folder, SCRIPTS / "ddp.py", "echelon")
    assert again.returncode == 1
    assert "is not an empty folder" in again.stderr


@pytest.mark.parametrize(("kind", "whole"), [("raises", [1]), ("leaves", [0, 1])])
def test_a_job_that_fails_leaves_its_record(tmp_path, kind, whole):
    """Where a rank raises, MPI's launcher kills the others at once."""
    job = echelon("run", "-n", 2, "--record", tmp_path / "new", ROOT / "tests/comm/scripts/fault.py", kind, 1, 57, 3)
    assert job.returncode == 1
    logs = read(tmp_path / "new")
    assert all(len(logs[rank]) >= 57 for rank in whole)


def test_a_killed_rank_leaves_all_but_the_last_moments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('echelon')\n"
        "for _ in range(20): dist.all_reduce(torch.ones(3))\n"
        f"time.sleep({3 * records._INTERVAL})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    started = time.monotonic()
    assert echelon("run", "-n", 2, "--record", tmp_path / "record", script).returncode != 0
    assert time.monotonic() - started < 60
    assert [len(log) for log in read(tmp_path / "record").values()] == [20, 20]
