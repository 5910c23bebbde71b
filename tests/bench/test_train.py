"""`echelon bench train`: the lines, what is written, and what is refused before any rank starts."""

from __future__ import annotations

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from echelon import cli
from echelon.bench.train_options import TrainOptions, parse_changes
from echelon.bench.train_report import Rate, Result, heading
from echelon.launch.find import find
from echelon.launch.start import Job, command_line
from tests.launch.jobs import echelon, run

FIGURE = r"\d+\.\d \+-\d+\.\d"
SHORT = ["--num-warmup-batches", 1, "--num-batches-per-iter", 2, "--num-iters", 2]
GPT = ["--model", "gpt2", "--length", 16, "--batch-size", 2]
GPT += [part for change in ("vocabulary=61", "dim=32", "layers=2", "heads=4") for part in ("--set", change)]
RESNET = ["--model", "resnet18", "--image", 16, "--batch-size", 4]
RESNET += ["--set", "dims=[8,16]", "--set", "depths=[1,1]", "--set", "stem_dim=8"]


def match(patterns: list[str], output: str) -> None:
    lines = output.splitlines()
    assert len(lines) == len(patterns), output
    for pattern, line in zip(patterns, lines):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


def test_images(tmp_path):
    data = tmp_path / "deep" / "train.json"
    job = echelon("bench", "train", *RESNET, *SHORT, "-n", 2, "--json", data, timeout=180)
    assert job.returncode == 0, job.stderr
    match(
        [
            "Model: resnet18",
            "Batch size: 4",
            "Number of CPUs: 2",
            r"Running one CPU alone\.\.\.",
            r"Running warmup\.\.\.",
            r"Running benchmark\.\.\.",
            r"Iter #0: \d+\.\d img/sec per CPU",
            r"Iter #1: \d+\.\d img/sec per CPU",
            f"Img/sec per CPU: {FIGURE}",
            rf"Total img/sec on 2 CPU\(s\): {FIGURE}",
            f"One CPU alone: {FIGURE} img/sec",
            r"Scaling efficiency on 2 CPU\(s\): \d+\.\d% \+-\d+\.\d%",
        ],
        job.stdout,
    )
    told = json.loads(data.read_text())
    assert (told["unit"], told["machine"]["ranks"], told["options"]["image"]) == ("img/sec", 2, 16)
    assert [len(told[name]) for name in ("iterations", "iterations alone")] == [2, 2]
    assert told["total"]["mean"] == pytest.approx(2 * told["each"]["mean"])
    assert told["efficiency"]["mean"] == pytest.approx(told["each"]["mean"] / told["alone"]["mean"])
    assert f"Img/sec per CPU: {told['each']['mean']:.1f} +-{told['each']['spread']:.1f}\n" in job.stdout


def test_tokens_in_a_layout_under_mpiexec():
    cli_words = [sys.executable, "-m", "echelon.cli", "bench", "train"]
    options = [*GPT, *SHORT, "--tp", 2, "--stage", 3, "--precision", "bf16", "--device", "cpu"]
    job = run(*command_line(Job(4, [*cli_words, *map(str, options)]), find()), timeout=180)
    assert job.returncode == 0, job.stderr
    match(
        [
            "Model: gpt2",
            "Batch size: 2",
            "Sequence length: 16",
            "Number of CPUs: 4",
            r"Running one CPU alone\.\.\.",
            r"Running warmup\.\.\.",
            r"Running benchmark\.\.\.",
            r"Iter #0: \d+\.\d tokens/sec per CPU",
            r"Iter #1: \d+\.\d tokens/sec per CPU",
            f"Tokens/sec per CPU: {FIGURE}",
            rf"Total tokens/sec on 4 CPU\(s\): {FIGURE}",
            f"One CPU alone: {FIGURE} tokens/sec",
            r"Scaling efficiency on 4 CPU\(s\): \d+\.\d% \+-\d+\.\d%",
        ],
        job.stdout,
    )


def test_one_rank_has_no_efficiency():
    job = echelon("bench", "train", *GPT, *SHORT, "-n", 1, timeout=180)
    assert job.returncode == 0, job.stderr
    assert "Total tokens/sec on 1 CPU(s): " in job.stdout
    assert "alone" not in job.stdout
    assert "efficiency" not in job.stdout


def test_an_error_under_mpiexec_is_said_once():
    cli_words = [sys.executable, "-m", "echelon.cli", "bench", "train", "--model", "gpt3"]
    job = run(*command_line(Job(2, cli_words), find()))
    assert job.returncode == 2
    assert job.stderr.count("no model is named 'gpt3' (did you mean 'gpt2'?)") == 1


def test_figures_are_those_of_the_original():
    """Mean, and 1.96 standard deviations of the iterations; totals are so many times both."""
    options = TrainOptions(model="resnet50", batch_size=64, device="cpu")
    result = Result(options, 2, [90.0, 110.0], [125.0])
    assert list(heading(options, 2)) == ["Model: resnet50", "Batch size: 64", "Number of CPUs: 2"]
    assert list(result.lines()) == [
        "Img/sec per CPU: 100.0 +-19.6",
        "Total img/sec on 2 CPU(s): 200.0 +-39.2",
        "One CPU alone: 125.0 +-0.0 img/sec",
        "Scaling efficiency on 2 CPU(s): 80.0% +-15.7%",
    ]


def test_the_spread_of_a_ratio():
    assert Rate(8.0, 0.3 * 8).over(Rate(4.0, 0.4 * 4)) == Rate(2.0, pytest.approx(2.0 * 0.5))


def test_changes():
    assert parse_changes(["dim=64", "tied=false", "dims=[1, 2]", "dropout=0.1"]) == {
        "dim": 64,
        "tied": False,
        "dims": [1, 2],
        "dropout": 0.1,
    }
    with pytest.raises(ValueError, match="--set dim: write name=value"):
        parse_changes(["dim"])
    with pytest.raises(ValueError, match="'wide' is no number"):
        parse_changes(["dim=wide"])


def test_options_go_to_the_ranks_whole():
    options = TrainOptions(model="vit-b16", changes={"dim": 48}, image=32, tp=2, compile=True, precision="bf16")
    assert TrainOptions.from_text(options.to_text()) == options
    assert options.image_size == options.config.image == 32  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "resnet5"], "no model is named 'resnet5' (did you mean 'resnet50'?)"),
        (["--model", "gpt2", "--set", "layer=2"], "has no field 'layer' (did you mean 'layers'?)"),
        (["--model", "gpt2", "--set", "layers=2.5"], "layers = 2.5 is not a whole number"),
        (["--batch-size", 0], "--batch-size 0: it is 1 or more"),
        (["--num-iters", 0], "--num-iters 0: it is 1 or more"),
        (["-n", 0], "-n 0: it is 1 or more"),
        (["-n", 3, "--model", "gpt2", "--tp", 2], "Layout(dp=-1, tp=2) does not fit 3 ranks"),
        (["-n", 2, "--tp", 2], "ResNet has no `blocks` of attention and MLP that tp could split"),
        (["-n", 5, "--model", "gpt2", "--tp", 5], "tp=5 cannot split 12 heads"),
        (["-n", 2, "--model", "vit-b16", "--cp", 2], "ViT has no sequences of `tokens` that cp could split"),
        (["-n", 2, "--model", "gpt2", "--cp", 2, "--length", 10], "choose a length that is a multiple of 4"),
        (["-n", 2, "--model", "gpt2", "--tp", 2, "--length", 9], "--length 9 cannot be split over --tp 2"),
        (["--model", "gpt2", "--length", 4096], "gpt2 has a context of 1024 tokens: use so many or less"),
        (["--length", 64], "resnet50 sees images; their size is --image"),
        (["--model", "gpt2", "--image", 64], "gpt2 reads tokens; how many is --length"),
        (["--stage", 4], "stage=4 is none of 0, 1, 2, 3"),
        (["--precision", "fp8"], "precision='fp8' is none of fp64, fp32, bf16, fp16"),
        (["--compile"], "ResNet has no list `blocks`: it can be neither recomputed nor compiled"),
        (["--device", "tpu"], "there is no device 'tpu': take auto, cpu or cuda"),
    ],
)
def test_refused(arguments, words, monkeypatch):
    monkeypatch.setattr("echelon.bench.train_command.run", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setenv("COLUMNS", "400")
    job = CliRunner().invoke(cli.app, ["bench", "train", *map(str, arguments)])
    assert job.exit_code == 2, job.output
    assert job.stderr.startswith("echelon: ")
    assert words in job.stderr


def test_it_is_a_command_of_its_own_beside_bench():
    shown = CliRunner().invoke(cli.app, ["bench", "train", "--help"])
    assert shown.exit_code == 0
    assert "--num-batches-per-iter" in shown.stdout
    assert "train" in {line.split()[0] for line in CliRunner().invoke(cli.app, ["bench"]).stdout.splitlines() if line}
    late = CliRunner().invoke(cli.app, ["bench", "-n", "2", "train"])
    assert late.exit_code == 2
    assert "`echelon bench train` comes first" in late.stderr
