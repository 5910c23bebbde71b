"""`echelon trace`, on records made by hand, whose figures can be told without it, and on those of a real job."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from echelon.comm.records import Log, Record
from echelon.trace.chrome import timeline
from echelon.trace.links import read_links
from echelon.trace.summary import bus_factor, by_dimension, summarise, traffic
from tests.launch.jobs import SCRIPTS, echelon

MS = 10**6


def record(operation: str, payload: int, enqueued: int, took: int, **more) -> Record:
    """One that began at once; times in milliseconds."""
    made = Record(operation, "0", "dp", (0, 1), "float32", payload, enqueued * MS)
    made.started, made.ended, made.sequence = enqueued * MS, (enqueued + took) * MS, 1
    for name, value in more.items():
        setattr(made, name, value)
    return made


def logs(*by_rank: list[Record], steps: tuple[int, ...] = ()) -> dict[int, Log]:
    made = {}
    for rank, records in enumerate(by_rank):
        made[rank] = Log()
        made[rank].extend(records)
        made[rank].steps = [step * MS for step in steps]
    return made


def test_a_line():
    size = 2**21
    first = [record("all_reduce", size, 10, 4, wire=size, modelled=True, blocked=3 * MS)]
    second = [record("all_reduce", size, 12, 2, wire=size, modelled=True, blocked=MS)]
    summary = summarise(logs(first, second, steps=(0, 10, 20)))
    assert (summary.ranks, summary.steps, summary.seconds) == (2, 3, 0.020)
    [line] = summary.lines
    assert (line.dimension, line.operation, line.size_class, line.count) == ("dp", "all_reduce", "≤ 16 MiB", 1)
    assert (line.payload, line.wire, line.modelled) == (size, size, True)
    assert line.time == pytest.approx(0.003)
    assert line.algbw == pytest.approx(size / 0.003)
    assert line.busbw == line.algbw  # of two ranks
    assert line.share == pytest.approx(0.15)
    assert line.blocked == pytest.approx(0.002)
    assert (line.slowest, line.delay) == (1, pytest.approx(0.002))


def test_lines_are_by_dimension_operation_and_size():
    one = [
        record("all_reduce", 4, 0, 1),
        record("all_reduce", 2**30, 1, 1),
        record("broadcast", 4, 2, 1),
        record("all_reduce", 4, 3, 1, dimension="tp"),
        record("all_reduce", 4, 4, 1, dimension=""),
        record("all_reduce", 4, 5, 0, ended=0),  # never came to an end
        record("receive", 0, 6, 1, peer=1),
    ]
    summary = summarise(logs(one))
    assert [(line.dimension, line.operation, line.size_class) for line in summary.lines] == [
        ("dp", "all_reduce", "≤ 4 KiB"),
        ("dp", "all_reduce", "> 16 MiB"),
        ("dp", "broadcast", "≤ 4 KiB"),
        ("other", "all_reduce", "≤ 4 KiB"),
        ("tp", "all_reduce", "≤ 4 KiB"),
    ]
    assert all(line.slowest is None for line in summary.lines)


def test_averages_are_over_those_who_took_part():
    summary = summarise(logs([record("all_reduce", 8, 0, 1, ranks=(0,))], []))
    assert summary.lines[0].count == 1


@pytest.mark.parametrize(
    ("operation", "size", "factor"),
    [("all_reduce", 4, 1.5), ("all_gather_single", 4, 0.75), ("reduce_scatter", 2, 0.5), ("broadcast", 8, 1.0)],
)
def test_bus_factor(operation, size, factor):
    assert bus_factor(operation, size) == factor


def test_traffic():
    three = {"ranks": (0, 1, 2)}
    first = [
        record("all_reduce", 0, 0, 1, wire=8, modelled=True, **three),
        record("all_to_all", 0, 0, 1, wire=6, **three),
        record("send", 5, 0, 1, wire=5, peer=2, **three),
    ]
    found = logs(first, [], [record("all_gather", 0, 0, 1, wire=7, modelled=True, **three)])
    assert traffic(found).tolist() == [[0, 11, 8], [0, 0, 0], [7, 0, 0]]
    assert by_dimension(found) == {"dp": {"all_reduce": 8, "all_to_all": 6, "send": 5, "all_gather": 7}}


def test_links(tmp_path):
    assert read_links(tmp_path, np.zeros((4, 4), dtype=np.int64)) == []
    nodes = [
        {"name": "n1", "ranks": [0, 1], "sent": 100, "received": 90},
        {"name": "n2", "ranks": [2, 3], "sent": 90, "received": 100},
    ]
    (tmp_path / "links.json").write_text(json.dumps({"rate_bits": 10**9, "nodes": nodes}))
    matrix = np.zeros((4, 4), dtype=np.int64)
    matrix[0, 1], matrix[1, 2], matrix[3, 0] = 5, 80, 70
    assert [(link.node, link.sent, link.recorded) for link in read_links(tmp_path, matrix)] == [
        ("n1", 100, 80),
        ("n2", 90, 70),
    ]


def test_timeline():
    one = [record("all_reduce", 4, 5, 2), record("send", 4, 6, 3, peer=1), record("all_reduce", 4, 9, 0, ended=0)]
    events = timeline(logs(one, [record("all_reduce", 4, 6, 1)], steps=(8,)))["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert tracks == {0: "rank 0", 1: "rank 1"}
    whole = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert whole == [(0, "all_reduce", 0, 2000), (1, "all_reduce", 1000, 1000)]
    assert [(event["ph"], event["ts"]) for event in events if event["name"] == "send"] == [("b", 1000), ("e", 4000)]
    assert [event["ts"] for event in events if event["name"] == "step 1"] == [3000, 3000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("record") / "job"
    assert echelon("run", "-n", 2, "--record", path, SCRIPTS / "ddp.py", "echelon").returncode == 0
    return path


def test_the_table(folder):
    job = echelon("trace", folder)
    assert job.returncode == 0, job.stderr
    assert "2 ranks, 3 steps" in job.stdout
    assert "all_reduce" in job.stdout


def test_for_programs(folder):
    as_json = json.loads(echelon("trace", folder, "--json").stdout)
    as_csv = list(csv.DictReader(io.StringIO(echelon("trace", folder, "--csv").stdout)))
    assert [line["operation"] for line in as_csv] == [line["operation"] for line in as_json["lines"]]
    assert [float(line["payload"]) for line in as_csv] == [line["payload"] for line in as_json["lines"]]
    assert as_json["ranks"] == 2


def test_files(folder, tmp_path):
    job = echelon("trace", folder, "--chrome", tmp_path / "t.json", "--plot", tmp_path / "t.png")
    assert job.returncode == 0, job.stderr
    assert {event["pid"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {0, 1}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_errors(tmp_path, folder):
    assert "holds no record" in echelon("trace", tmp_path).stderr
    assert "holds no record" in echelon("trace", tmp_path / "nowhere").stderr
    job = echelon("trace", folder, "--plot", tmp_path / "t.nonsense")
    assert (job.returncode, "cannot be drawn" in job.stderr) == (1, True)
