"""`echelon train` as people use it: started, killed, stopped, resumed, refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from echelon.cli import app
from echelon.comm.records import read as read_records
from echelon.launch.find import find
from echelon.launch.start import Job, command_line
from echelon.plan.traffic import traffic
from echelon.train.checkpoint import complete
from echelon.train.checks import check, meta_model
from echelon.train.config import load
from echelon.train.faults import STOPPED
from echelon.train.loop import Trainer
from tests.launch.jobs import ROOT, echelon, environment
from tests.train.runs import config, losses, rows, write

LONG = {"steps": 60, "batch": 8, "log_every": 1}


def begin(*arguments: object) -> subprocess.Popen[str]:
    """`echelon train`, under way."""
    command = [sys.executable, "-m", "echelon.cli", "train", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT
    )


def wait_until(condition: Callable[[], object], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, "it did not come to pass in a minute"
        time.sleep(0.002)


def processes(folder: Path, module: str = "echelon.train.rank") -> list[int]:
    """The ranks of a run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"python") and {module.encode(), str(folder).encode()} <= set(words):
            found.append(int(process.name))
    return sorted(found)


def steps_taken(folder: Path) -> int:
    return len(rows(folder)) if (folder / "metrics.jsonl").exists() else 0


def rank_of(folder: Path, job: subprocess.Popen[str]) -> int:
    """One of a run's processes, when it has begun: to look for it takes as long as many steps."""
    wait_until(lambda: steps_taken(folder), job)
    return processes(folder)[-1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = echelon("train", write(folder / "long.toml", train=LONG, checkpoint={"every": 10}), "-n", 2, "--run", folder)
    assert job.returncode == 0, job.stdout + job.stderr
    return folder


def test_what_a_run_leaves_and_says(undisturbed):
    for name in ("config.toml", "metrics.jsonl", "memory.json", "report.html", "record/rank-1.rows"):
        assert (undisturbed / name).exists(), name
    assert complete(undisturbed / "checkpoints") == [50, 60]
    assert rows(undisturbed, "end")[-1]["why"] == "done"
    assert losses(undisturbed)[-1] < losses(undisturbed)[0]
    board = EventAccumulator(str(undisturbed / "tensorboard")).Reload()
    assert [point.value for point in board.Scalars("loss")] == pytest.approx(losses(undisturbed), rel=1e-6)


@pytest.mark.parametrize("moment", ["a step", "a save"])
def test_a_killed_rank_brings_the_job_back(tmp_path, undisturbed, moment):
    """The run goes on from the last checkpoint by itself, and is bitwise the one that was not disturbed."""
    folder = tmp_path / "run"
    path = write(tmp_path / "long.toml", train=LONG, checkpoint={"every": 10})
    job = begin(path, "-n", 2, "--run", folder, "--restarts", 1)
    rank = rank_of(folder, job)
    if moment == "a step":
        wait_until(lambda: steps_taken(folder) >= 15, job)
    else:
        wait_until(lambda: list(folder.glob("checkpoints/*.saving")) and complete(folder / "checkpoints"), job)
    os.kill(rank, signal.SIGKILL)
    output = job.communicate(timeout=90)[0]
    assert job.returncode == 0, output
    assert "restart 1 of 1, from step" in output
    assert losses(folder) == losses(undisturbed)
    assert complete(folder / "checkpoints") == [50, 60]
    assert not list(folder.glob("checkpoints/*.saving"))


def test_a_hang_becomes_an_error_and_the_job_comes_back(tmp_path, undisturbed):
    """A rank is stopped: the other waits for as long as it is told to, says for whom, and the run goes on."""
    folder = tmp_path / "run"
    path = write(tmp_path / "long.toml", train=LONG | {"timeout": 8.0}, checkpoint={"every": 10})
    job = begin(path, "-n", 2, "--run", folder, "--restarts", 1)
    rank = rank_of(folder, job)
    wait_until(lambda: steps_taken(folder) >= 15, job)
    os.kill(rank, signal.SIGSTOP)
    output = job.communicate(timeout=90)[0]
    assert job.returncode == 0, output
    assert "was not complete after the timeout of 8 s: rank 1 had not arrived" in output
    assert "restart 1 of 1, from step" in output
    assert losses(folder) == losses(undisturbed)
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_asked_to_stop_it_saves(tmp_path, undisturbed, number):
    """And can go on, for which one of these must do."""
    folder = tmp_path / "run"
    job = begin(write(tmp_path / "long.toml", train=LONG, checkpoint={"every": 10}), "-n", 2, "--run", folder)
    wait_until(lambda: steps_taken(folder) >= 5, job)
    job.send_signal(number)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == STOPPED, output
    (step,) = complete(folder / "checkpoints")[-1:]
    assert f"stopped at step {step}; go on with: echelon train {folder} -n 2" in " ".join(output.split())
    assert rows(folder, "end")[-1]["why"] == "stopped"
    assert losses(folder) == losses(undisturbed)[:step]
    if number == signal.SIGTERM:
        again = echelon("train", folder, "-n", 2)
        assert again.returncode == 0, again.stdout + again.stderr
        assert losses(folder) == losses(undisturbed)


def test_asked_to_stop_before_it_has_begun(tmp_path):
    folder = tmp_path / "run"
    job = begin(write(tmp_path / "long.toml", train=LONG), "-n", 2, "--run", folder)
    wait_until(lambda: processes(folder), job)
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == STOPPED, output
    assert complete(folder / "checkpoints") == [1]


def test_other_ranks_and_layouts_go_on(undisturbed, tmp_path):
    """What the number of ranks leaves for dp is found anew."""
    shutil.copytree(undisturbed, tmp_path / "run")
    given = ["--set", "layout.tp=2", "--set", "train.steps=62"]
    job = echelon("train", tmp_path / "run", "-n", 4, *given)
    assert job.returncode == 0, job.stderr
    assert rows(tmp_path / "run", "start")[-1]["layout"] == "Layout(dp=2, tp=2)"
    assert len(losses(tmp_path / "run")) == 62


def test_ranks_that_are_told_themselves(tmp_path):
    """Under another launcher, whose ranks get the signal: mpiexec starts `echelon train` itself."""
    folder = tmp_path / "run"
    path = write(tmp_path / "long.toml", train=LONG)
    command = [sys.executable, "-m", "echelon.cli", "train", path, "--run", folder]
    job = subprocess.Popen(
        command_line(Job(2, [str(part) for part in command]), find()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    wait_until(lambda: steps_taken(folder) >= 5, job)
    ranks = processes(folder, "echelon.cli")
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGTERM)  # one is enough
    output = job.communicate(timeout=60)[0]
    assert job.returncode != 0
    assert rows(folder, "end")[-1]["why"] == "stopped", output
    assert complete(folder / "checkpoints")


DIVERGES = {"optimizer": {"lr": 1e200}, "schedule": {"warmup": 0}}


def test_a_loss_that_is_no_number(tmp_path):
    job = echelon(
        "train", write(tmp_path / "bad.toml", **DIVERGES), "-n", 2, "--run", tmp_path / "run", "--restarts", 3
    )
    words = " ".join(job.stderr.split())
    assert job.returncode == 2, job.stdout + job.stderr
    assert "step 2: the loss is nan" in words
    assert "the first gradient that is not finite is " in words
    assert "on rank 0" in words
    assert "restart" not in words  # it would end the same way
    assert rows(tmp_path / "run", "end")[-1]["why"] == "failed"


def goes_on(folder: str) -> bool:
    return Trainer(config(**DIVERGES, train={"non_finite": "skip"}), folder).run().done


def test_steps_without_a_finite_loss_are_skipped(ranks, tmp_path):
    assert all(ranks(2, goes_on, str(tmp_path)))
    assert [row["step"] for row in rows(tmp_path, "skip")] == [2, 3, 4, 5, 6]


def command(*arguments: object) -> Result:
    """`echelon train` in this process: for what starts no ranks."""
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.toml", strategies={"precision": "fp32"})
    job = command(path, "-n", 4, "--set", "layout.tp=2", "--dry-run")
    assert job.exit_code == 0, job.output
    for words in ("[strategies]", "tp = 2", "dp = 2", "MiB that a rank holds", "all_reduce", "ranks 0–3"):
        assert words in job.stdout, job.stdout
    assert list(tmp_path.iterdir()) == [path]


def test_dry_run_of_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.toml", strategies={"precision": "fp32"})
    job = command(path, "-n", 4, "--set", "layout.pp=2", "--set", "strategies.balance=time", "--dry-run")
    assert job.exit_code == 0, job.output
    for words in (
        "in 4 passes of 1 on each rank",
        "1f1b: 2 stages, a bubble of 20.0%",
        "stage 1: ",
        "ranks 2, 3",
        "send",
    ):
        assert words in job.stdout, job.stdout


def test_dry_runs_of_what_is_shipped(monkeypatch):
    """Also where the data is not there."""
    monkeypatch.chdir(ROOT)
    for path in sorted(Path("configs").glob("*.toml")):
        job = command(path, "-n", 8, "--dry-run")
        assert job.exit_code == 0, job.output
        assert "MiB of payload" in job.output
    local = command("configs/gpt-small.toml", "-n", 2, "--set", "strategies.average_every=8", "--dry-run")
    assert "every 8 steps" in local.output


def test_a_run_sends_what_was_planned(undisturbed):
    """Between the first two steps that were recorded: all that data parallelism sends, by operation."""
    planned = check(load(undisturbed / "config.toml"), 2)
    expected = traffic(meta_model(planned), planned.layout, planned.strategies, planned.train.batch, planned.length)
    (log, _) = read_records(undisturbed / "record").values()
    between = [record for record in log if log.steps[0] < record.enqueued < log.steps[1] and record.dimension == "data"]
    sent = Counter()
    for record in between:
        sent["data", record.operation] += record.payload
    assert sent == Counter({key: payload for key, payload in expected.items() if key[0] == "data"})


def test_a_second_job_harms_nothing(tmp_path):
    """Refused by its launcher, while the first goes on to its end."""
    folder = tmp_path / "run"
    path = write(tmp_path / "long.toml", train=LONG)
    job = begin(path, "-n", 2, "--run", folder)
    wait_until(lambda: steps_taken(folder) >= 3, job)
    second = command(path, "-n", 2, "--run", folder)
    assert second.exit_code == 2
    assert "is in use" in " ".join(second.output.split())
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert [row["why"] for row in rows(folder, "end")] == ["done"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "train.stpes=3"], "did you mean 'steps'?"),
        (["-n", "3", "--set", "layout.tp=2"], "does not fit 3 ranks"),
        (["--set", "data.kind=tokens", "--set", "data.path=nowhere.bin"], "there is no such file"),
        (["--init", "nowhere"], "nowhere"),
        (["--cluster", "2x"], "2x"),
    ],
)
def test_refusals(tmp_path, arguments, words):
    """Before any rank is started, and before anything is written."""
    job = command(write(tmp_path / "a.toml"), "--run", tmp_path / "run", *arguments)
    assert job.exit_code == 2
    assert words in " ".join(job.output.split())
    assert not (tmp_path / "run").exists()


def test_a_folder_is_not_for_two_runs(tmp_path, undisturbed):
    job = command(undisturbed / "long.toml", "--run", undisturbed, "--set", "checkpoint.resume=never")
    assert job.exit_code == 2
    assert "has a run that was saved at step 60" in " ".join(job.output.split())


def test_fine_tuning(tmp_path, undisturbed):
    """From a run to a Hugging Face folder, and from there to a run that begins where the other ended."""
    exported = CliRunner().invoke(app, ["runs", "export", str(undisturbed), str(tmp_path / "hf")])
    assert exported.exit_code == 0, exported.output
    given = ["--init", tmp_path / "hf", "--set", "optimizer.lr=1e-9", "--set", "train.steps=2"]
    job = echelon("train", undisturbed / "long.toml", "--run", tmp_path / "run", *given)
    assert job.returncode == 0, job.stderr
    assert rows(tmp_path / "run", "eval")[-1]["loss"] == pytest.approx(rows(undisturbed, "eval")[-1]["loss"], rel=1e-4)


def test_a_config_of_another_model(undisturbed):
    """It is refused, and the run is as it was."""
    before = {path.name: path.read_bytes() for path in undisturbed.iterdir() if path.is_file()}
    job = echelon("train", undisturbed, "-n", 2, "--set", "model.dim=64", "--set", "train.steps=70")
    assert job.returncode == 2
    assert "its model.dim is 32, here it is 64" in " ".join(job.stderr.split())
    assert {path.name: path.read_bytes() for path in undisturbed.iterdir() if path.is_file()} == before
