"""`echelon tune`, as people call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from echelon.comm.tables import read
from echelon.launch.cluster import obstacle
from echelon.tune.points import Point, Question
from echelon.tune.result import figures_of

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "echelon.cli")
SMALL = ("-m", "64:1K", "--operations", "all_reduce,gather,message", "--samples", "40")


def echelon(*arguments: str, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    how = _how(cache, variables)
    return subprocess.run([*COMMAND, *arguments], **how, capture_output=True, timeout=120, check=False)


def interrupted(part: Path, *arguments: str, cache: Path) -> list[str]:
    """Ctrl-C, when three points have been measured; returns the lines that are left."""
    with subprocess.Popen([*COMMAND, *arguments], **_how(cache, {}), stderr=subprocess.DEVNULL) as process:
        while not part.exists() or len(part.read_text().splitlines()) < 1 + 3:
            assert process.poll() is None, "it ended before it could be interrupted"
            time.sleep(0.01)  # so that it has the cores
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
    return part.read_text().splitlines()


def _how(cache: Path, variables: dict[str, str]) -> dict[str, Any]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "COLUMNS": "100"} | variables
    return {"cwd": ROOT, "env": environment, "text": True}


def routes(cache: Path, ranks: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a job says of its routes."""
    script = "tests/tune/scripts/routes.py"
    return echelon("run", "-n", str(ranks), script, cache=cache, **variables)


def test_a_tuning_is_interrupted_goes_on_and_serves(tmp_path):
    cache, output = tmp_path / "cache", tmp_path / "routes.json"
    part = output.with_name("routes.json.part")
    begun = interrupted(part, "tune", "-n", "2", *SMALL, "-o", str(output), cache=cache)
    assert not output.exists()

    other = echelon("tune", "-n", "2", *SMALL[:-1], "5", "-o", str(output), cache=cache)
    assert (other.returncode, part.read_text().splitlines()) == (2, begun)
    assert "was begun with other options" in other.stderr
    assert "Traceback" not in other.stderr

    # The routes in force, here of a table that is still to be, have no part in it.
    done = echelon("tune", "-n", "2", *SMALL, "-o", str(output), cache=cache, ECHELON_ROUTE=str(output))
    assert done.returncode == 0, done.stderr
    assert not part.exists()
    assert "2 ranks on 1 node, cpu" in done.stdout
    table = read(output)
    entries = table.about["measured"]
    assert len(begun) < 1 + len(entries)
    assert entries[: len(begun) - 1] == [json.loads(line) for line in begun[1:]]  # not measured again
    points = figures_of(table)
    assert {(point.question.operation, point.question.low) for point in points} == {
        ("all_reduce", False),
        ("all_reduce", True),
        ("gather", False),
        ("message", False),
    }
    assert {point.size for point in points} == {64, 256, 1024}
    for found in points.values():
        assert all(figure.median > 0 for figure in found.values())
        assert {"mpi", "gloo"} <= set(map(str, found))

    shown = echelon("tune", "--show", str(output), cache=cache)
    assert shown.stdout == done.stdout
    automatic = routes(cache, 2, ECHELON_ROUTE="auto")
    assert "no table" not in automatic.stderr
    assert automatic.stdout == routes(cache, 2, ECHELON_ROUTE=str(output)).stdout

    data = json.loads(output.read_text())
    data["machine"]["mpi"] = "another MPI"
    output.write_text(json.dumps(data))
    elsewhere = routes(cache, 2, ECHELON_ROUTE=str(output))
    assert elsewhere.stdout == automatic.stdout
    assert elsewhere.stderr.count("was measured elsewhere (mpi 'another MPI', here") == 1


def test_without_a_table_that_fits_auto_is_the_default_and_says_so(tmp_path):
    (tmp_path / "echelon" / "routes").mkdir(parents=True)
    (tmp_path / "echelon" / "routes" / "broken.json").write_text("{")
    automatic = routes(tmp_path, 2, ECHELON_ROUTE="auto")
    assert automatic.returncode == 0
    assert "no table of this machine is for 2 ranks on 1 node; `echelon tune -n 2` makes one" in automatic.stderr
    assert "broken.json cannot be read as a table of routes: it is not JSON" in automatic.stderr
    assert automatic.stdout == routes(tmp_path, 2).stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-n", "2", "--operations", "all_sum"), "there is no operation 'all_sum'"),
        (("-n", "2", "-m", "x"), "-m x"),
        (("-n", "2", "--device", "tpu"), "--device tpu: take cpu"),
        (("--cluster", "2x2"), "'2x2' is not a cluster"),
        (("-n", "3", "--cluster", "2x2@1gbit"), "leave -n and --hosts out"),
        (("-n", "2", "-o", "."), "is a folder"),
        (("--show", "README.md"), "README.md cannot be read as a table of routes: it is not JSON"),
    ],
)
def test_what_cannot_be_tuned(tmp_path, arguments, reason):
    done = echelon("tune", *arguments, cache=tmp_path)
    assert done.returncode == 2
    assert reason in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [("run", "-n", "2", "tests/tune/scripts/routes.py"), ("train", "configs/gpt-small.toml", "-n", "2")]
)
def test_a_wrong_variable_is_said_once_before_any_rank_starts(tmp_path, arguments):
    done = echelon(*arguments, cache=tmp_path, ECHELON_ROUTE="fast")
    assert done.returncode == 2
    assert done.stderr.count("ECHELON_ROUTE=fast is no road") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(bool(obstacle()), reason=f"an emulated cluster {obstacle()}")
def test_a_cluster_is_tuned_in_every_shape(tmp_path):
    output = tmp_path / "routes.json"
    small = ("-m", "64K:64K", "--operations", "all_reduce", "--samples", "2")
    done = echelon("tune", "--cluster", "2x2@1gbit", *small, "-o", str(output), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    table = read(output)
    assert table.about["machine"]["links"] == "1000 Mbit/s"
    assert {(rule.ranks, rule.nodes) for rule in table.rules} == {(2, 1), (2, 2), (4, 2)}
    across = Point(Question("all_reduce", 4, 2), 2**16)
    assert "mpi+two-level" in map(str, figures_of(table)[across])
