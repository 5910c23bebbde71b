"""Sizes, defaults, and what is refused before any rank starts."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from echelon import cli
from echelon.bench.catalogue import BENCHMARKS, find
from echelon.bench.options import BadRequest, Options, parse_sizes
from tests.launch import jobs


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4:16M", (4, 2**24)),
        ("1M", (None, 2**20)),
        ("64:", (64, None)),
        ("1k:2KiB", (2**10, 2**11)),
        ("8:8", (8, 8)),
        ("1G", (None, 2**30)),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", ":", "4T", "x", "16:4", "0", "-4", "4:8:16", "1.5M"])
def test_no_sizes(text):
    with pytest.raises(BadRequest, match="-m "):
        parse_sizes(text)


def test_sizes_double_and_hold_whole_elements():
    assert list(Options("bcast", 1, 8).sizes(find("bcast"), 2)) == [1, 2, 4, 8]
    assert list(Options("allreduce", 1, 16).sizes(find("allreduce"), 2)) == [4, 8, 16]
    assert list(Options("reduce_scatter", 1, 32).sizes(find("reduce_scatter"), 3)) == [16, 32]
    assert list(Options("bcast", 6, 30).sizes(find("bcast"), 2)) == [6, 12, 24]
    assert max(Options("latency").sizes(find("latency"), 2)) == 2**22
    assert max(Options("bcast").sizes(find("bcast"), 2)) == 2**20


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [("latency", (10000, 100), (1000, 10)), ("bw", (100, 10), (20, 2)), ("ibcast", (1000, 100), (100, 10))],
)
def test_iterations_are_those_of_omb(name, small, large):
    benchmark = BENCHMARKS[name]
    assert Options(name).repetitions(benchmark, 8192) == small
    assert Options(name).repetitions(benchmark, 16384) == large
    assert Options(name, iterations=7, warmup=0).repetitions(benchmark, 16384) == (7, 0)


def test_options_go_to_the_ranks_whole():
    options = Options("bw", 4, 8, 1, 0, True, True, ("mpi", "raw"), ("torch", "numpy"), "cpu", "a", "b", "c", 80)
    assert Options.from_text(options.to_text()) == options


def run(*arguments: object):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["alreduce"], "did you mean allreduce?"),
        (["osu_bw"], "did you mean bw?"),
        (["quicksort"], "`echelon bench` lists them all"),
        (["latency", "-n", 3], "latency needs exactly two ranks, not 3"),
        (["mbw_mr", "-n", 3], "mbw_mr needs an even number of ranks, not 3"),
        (["bcast", "-n", 1], "at least two ranks"),
        (["bcast", "-m", "x:4"], "'x' is no size"),
        (["reduce_scatter", "-n", 4, "-m", 8], "needs 16 bytes or more on 4 ranks"),
        (["bcast", "-i", 0], "at least one iteration"),
        (["bcast", "-x", -1], "no fewer than 0"),
        (["bcast", "--transport", "mpi,infiniband"], "there is no transport 'infiniband': take of mpi, gloo, raw"),
        (["bcast", "--transport", ","], "at least one each"),
        (["bcast", "--buffer", "list"], "there is no buffer 'list'"),
        (["bcast", "--buffer", "numpy:nothing"], "cannot be made"),
        (["bcast", "--buffer", "no_such_module:zeros"], "cannot be made"),
        (["bcast", "--buffer", "tests.bench.arrays:no_array"], "neither the array nor the CUDA-array interface"),
        (["bcast", "--buffer", "pickle", "--transport", "gloo"], "add mpi to --transport"),
        (["ibcast", "--buffer", "pickle"], "no pickled form"),
        (["bcast", "--device", "tpu"], "there is no device 'tpu'"),
        (["bcast", "--device", "cuda", "--buffer", "numpy"], "--device cuda is for torch buffers"),
        (["bcast", "--plot", "picture.txt"], "must end in .png"),
        (["all", "--json", "x.json"], "into its --output folder"),
    ],
)
def test_refused(arguments, words, monkeypatch):
    monkeypatch.setattr("echelon.bench.command.run", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setenv("COLUMNS", "400")
    job = run(*arguments)
    assert job.exit_code == 2, job.output
    assert job.stderr.startswith("echelon: ")
    assert words in job.stderr


def test_other_commands_do_not_wait_for_torch():
    """It takes a second to import, and `echelon run` has no need of it."""
    code = "import sys, echelon.cli; sys.exit('torch' in sys.modules)"
    assert jobs.run(sys.executable, "-c", code).returncode == 0


def test_cupy_where_there_is_none(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "pip install cupy" in run("bcast", "--buffer", "cupy").stderr


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "needs a GPU that PyTorch sees" in run("bcast", "--device", "cuda").stderr


def test_without_a_name_they_are_listed():
    job = run()
    assert job.exit_code == 0
    listed = {line.split()[0] for line in job.stdout.splitlines() if line.strip()}
    assert {*BENCHMARKS, "all"} <= listed
