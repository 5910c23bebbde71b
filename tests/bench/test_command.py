"""Whole jobs: started by `echelon bench`, and by an MPI launcher itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.bench.catalogue import BENCHMARKS
from echelon.bench.result import Result
from echelon.launch.find import find
from echelon.launch.start import Job, command_line
from tests.launch.jobs import echelon, run

SCRIPTS = Path(__file__).parent / "scripts"
PNG = b"\x89PNG\r\n\x1a\n"


def test_bench_with_json_and_picture(tmp_path):
    data, picture = tmp_path / "deep" / "result.json", tmp_path / "result.png"
    options = ["-m", "4:64", "-i", 3, "-x", 1, "-c", "--transport", "mpi,gloo,raw", "--json", data, "--plot", picture]
    job = echelon("bench", "iallreduce", "-n", 2, *options)
    assert job.returncode == 0, job.stderr
    result = Result.read(data)
    assert [row.size for row in result.rows] == [4, 8, 16, 32, 64]
    assert result.machine["ranks"] == 2
    assert all(
        row.iterations == 3 and set(row.figures) == set(row.valid) == {"mpi", "gloo", "raw"} for row in result.rows
    )
    printed = [line.split() for line in job.stdout.splitlines() if line and not line.startswith("#")]
    assert [float(cell) for cell in printed[0][1:5]] == pytest.approx(
        [result.rows[0].figures["mpi"][key] for key in ("overall_us", "compute_us", "pure_us", "overlap_percent")],
        abs=0.005,
    )
    assert picture.read_bytes().startswith(PNG)


def test_under_mpiexec():
    command = [*map(str, _cli()), "bench", "bw", "-m", "8:16", "-i", "2", "-x", "0"]
    job = run(*command_line(Job(2, command), find()))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("# Echelon MPI Bandwidth Test") == 1
    assert [line.split()[0] for line in job.stdout.splitlines() if line[:1].isdigit()] == ["8", "16"]


def test_an_error_under_mpiexec_is_said_once():
    job = run(*command_line(Job(3, [*map(str, _cli()), "bench", "latency"]), find()))
    assert job.returncode == 2
    assert job.stderr.count("latency needs exactly two ranks, not 3") == 1


def test_a_wrong_result_fails_the_job():
    job = echelon("run", "-n", 2, SCRIPTS / "broken.py")
    assert job.returncode == 1
    rows = [line.split() for line in job.stdout.splitlines() if line[:1].isdigit()]
    assert [(row[0], row[-1]) for row in rows] == [("4", "Pass"), ("8", "Pass"), ("16", "Pass"), ("32", "Fail")]
    assert "allreduce of 32 bytes over mpi: rank 1 got" in job.stderr
    assert "as element 7, and 1 wrong ones in all" in job.stderr


def test_all_into_a_folder(tmp_path):
    folder = tmp_path / "results"
    job = echelon("bench", "all", "-n", 2, "-m", "8:16", "-i", 1, "-x", 0, "-c", "--output", folder, timeout=120)
    assert job.returncode == 0, job.stderr
    assert f"{len(BENCHMARKS)} benchmarks, of which 0 failed" in job.stdout
    report = (folder / "report.md").read_text()
    for name in BENCHMARKS:
        assert json.loads((folder / f"{name}.json").read_text())["benchmark"] == name
        assert f"\n## {name}\n" in report
        assert f"({name}.png)" in report
        assert (folder / f"{name}.png").read_bytes().startswith(PNG)
    assert (folder / "overview.png").read_bytes().startswith(PNG)
    assert "## Not run" not in report


def _cli() -> list[object]:
    import sys

    return [sys.executable, "-m", "echelon.cli"]
