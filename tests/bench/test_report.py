"""The report and the choice of the suite, without ranks."""

from __future__ import annotations

from echelon.bench.options import Options
from echelon.bench.report import human, write
from echelon.bench.result import Result, Row
from echelon.bench.suite import choose

MACHINE = {"ranks": 3, "cores": 4, "machine": "x", "mpi": "MPI", "torch": "2", "gpu": ""}


def test_what_cannot_be_run_is_left_out_with_the_reason():
    chosen, left_out = choose(Options("all"), 3)
    assert set(left_out) == {"latency", "bw", "bibw", "multi_lat", "mbw_mr"}
    assert left_out["bw"] == "bw needs exactly two ranks, not 3"
    assert "allreduce" in [benchmark.name for benchmark in chosen]


def test_report(tmp_path):
    rows = [Row(1024, 5, {"mpi": {"latency_us": 1234.567}}, {"mpi": False})]
    result = Result(
        "bcast", "Broadcast Latency Test", "latency", "MPI_CHAR", {"mpi": "words"}, MACHINE, rows, "all is wrong"
    )
    text = write([result], {"bw": "needs two"}, tmp_path).read_text()
    assert "| 1 KiB | 1,234.57 |" in text
    assert "- all is wrong" in text
    assert "- bw: needs two" in text
    assert "- `mpi`: words" in text


def test_human():
    assert [human(size) for size in (1, 1000, 1024, 1536, 2**20, 2**30)] == [
        "1 B",
        "1000 B",
        "1 KiB",
        "1536 B",
        "1 MiB",
        "1 GiB",
    ]
