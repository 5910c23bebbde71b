"""Emulated clusters: what may be asked for, that bytes really cross the links, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.launch.cluster import Cluster, ClusterSpec, LinkBytes, NoCluster, _on_cores, cluster, obstacle
from echelon.launch.find import find
from echelon.launch.start import Job, run
from tests.launch.jobs import ROOT, SCRIPTS, echelon, environment, result
from tests.pool import alive

emulated = pytest.mark.skipif(bool(obstacle()), reason=f"an emulated cluster {obstacle()}")
MIB = 2**20


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("2x2@1gbit", ClusterSpec(2, 2, 10**9)),
        ("3x1@500mbit", ClusterSpec(3, 1, 5 * 10**8)),
        ("2x2@1gbit+1ms", ClusterSpec(2, 2, 10**9, 1e-3)),
        (" 1x4@2.5Gbit+50us ", ClusterSpec(1, 4, 25 * 10**8, 5e-5)),
        ("16x8@64kbit+0.5s", ClusterSpec(16, 8, 64_000, 0.5)),
    ],
)
def test_parse(text, spec):
    assert ClusterSpec.parse(text) == spec


@pytest.mark.parametrize("text", ["", "2x2", "2x2@1g", "x2@1gbit", "2x2@1gbit+1", "2x2@1gbit +1ms", "2x2x2@1gbit"])
def test_what_is_no_cluster(text):
    with pytest.raises(NoCluster, match="is not a cluster: 2x2@1gbit is two nodes of two ranks each"):
        ClusterSpec.parse(text)


@pytest.mark.parametrize("text", ["0x2@1gbit", "2x0@1gbit", "2x2@0mbit"])
def test_an_empty_cluster(text):
    with pytest.raises(NoCluster, match="no nodes, no ranks or no rate: 2x2@1gbit is"):
        ClusterSpec.parse(text)


@given(st.integers(1, 50), st.integers(1, 50))
def test_ranks_fill_one_node_after_the_other(nodes, ranks):
    spec = ClusterSpec.parse(f"{nodes}x{ranks}@1gbit")
    assert [rank for name in spec.names for rank in spec.ranks_of(name)] == list(range(spec.ranks))
    assert spec.hosts == tuple(f"{name}:{ranks}" for name in spec.names)


def test_a_job_has_the_ranks_of_its_cluster():
    with pytest.raises(ValueError, match="has its 4 ranks"):
        Job(3, ["true"], cluster=ClusterSpec.parse("2x2@1gbit"))


def test_needs_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoCluster, match="needs root"), cluster(ClusterSpec.parse("2x1@1gbit")):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, that is what is missing first")
def test_needs_iproute2(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoCluster, match=r"needs ip, tc, .* apt-get install iproute2 "):
        cluster(ClusterSpec.parse("2x1@1gbit")).__enter__()


def machine() -> str:
    """This machine's own interfaces, with their queues."""
    return subprocess.check_output(["ip", "link"], text=True) + subprocess.check_output(["tc", "qdisc"], text=True)


def on(nodes: Cluster, name: str, command: str) -> str:
    return subprocess.check_output([nodes.agent, name, command], text=True).strip()


@emulated
def test_nodes_are_apart(tmp_path):
    """Names, networks and shared memory are a node's own, a second cluster changes nothing, and the machine has no
    part in it.
    """
    before = machine()
    shared = Path("/dev/shm") / f"echelon-test-{os.getpid()}"
    shared.mkdir()
    spec = ClusterSpec.parse("2x1@1gbit")
    try:
        with cluster(spec, [shared]) as one, cluster(spec) as other:
            assert machine() == before
            for nodes in (one, other):
                assert [on(nodes, name, "hostname") for name in spec.names] == ["n1", "n2"]
                assert on(nodes, "n2", "ls /sys/class/net").split() == ["eth0", "lo"]
            on(one, "n1", f"touch /dev/shm/mine {shared}/ours {tmp_path}/file")
            assert on(one, "n1", "ls /dev/shm").split() == [shared.name, "mine"]
            assert on(one, "n2", "ls /dev/shm").split() == [shared.name]
            assert on(one, "n2", f"ls {shared} && ls {tmp_path}").split() == ["ours", "file"]
            assert on(other, "n1", "ls /dev/shm") == ""
        assert [path.name for path in shared.iterdir()] == ["ours"]
    finally:
        for path in shared.iterdir():
            path.unlink()
        shared.rmdir()
    assert machine() == before


def test_nodes_have_cores_of_their_own_where_there_are_enough(monkeypatch):
    spec = ClusterSpec.parse("2x2@1gbit")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert [_on_cores(spec, node) for node in range(2)] == [["taskset", "-c", "0,1,2,3"], ["taskset", "-c", "4,5,6,7"]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert _on_cores(spec, 0) == []


SEND = """
import socket, sys, time
receiver = socket.create_connection(("n2", 5000))
data = bytes(int(sys.argv[1]))
start = time.perf_counter()
receiver.sendall(data)
receiver.shutdown(socket.SHUT_WR)
receiver.recv(1)
print(time.perf_counter() - start)
"""
RECEIVE = """
import socket
listener = socket.create_server(("n2", 5000))
print("ready", flush=True)
sender = listener.accept()[0]
while sender.recv(2**20):
    pass
"""


def stream(rate: str, size: int) -> tuple[float, dict[str, LinkBytes]]:
    """Seconds that `size` bytes take from one node to another, and what the links counted."""
    with cluster(ClusterSpec.parse(f"2x1@{rate}")) as nodes:
        command = f"exec {sys.executable} -c '{RECEIVE}'"
        with subprocess.Popen([nodes.agent, "n2", command], stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout.readline() == b"ready\n"
            seconds = float(on(nodes, "n1", f"{sys.executable} -c '{SEND}' {size}"))
        return seconds, nodes.link_bytes()


@emulated
def test_the_rate_is_a_limit():
    """Never faster than the rate, less what may pass at once; a link of ten times the rate is several times as fast."""
    size = MIB // 2
    slow, counted = stream("20mbit", size)
    fast, _ = stream("200mbit", 10 * size)
    assert slow > 0.95 * size * 8 / 20e6
    assert fast / 10 < slow / 2
    for sent, received in ((counted["n1"].sent, counted["n1"].received), (counted["n2"].received, counted["n2"].sent)):
        assert size < sent < 1.1 * size
        assert received < 0.1 * size


@emulated
def test_latency():
    """Felt where the kernel has netem, a clear error where it has not."""
    netem = "tc qdisc add dev lo root netem delay 1ms"
    if subprocess.run(["unshare", "--net", "sh", "-c", netem], capture_output=True, check=False).returncode == 0:
        assert stream("1gbit+100ms", 1)[0] > 0.2  # there and back
    else:
        with pytest.raises(NoCluster, match=r"needs the kernel's netem, which this kernel .* has not"):
            stream("1gbit+100ms", 1)


@emulated
@pytest.mark.parametrize("text", ["2x1@10gbit", "2x2@10gbit"])
def test_large_all_reduces_between_nodes(text, capfd, monkeypatch):
    """Patient where every rank has its own node, sync on some ranks and async on others: equal to the sum of all."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    spec = ClusterSpec.parse(text)
    code = run(Job(spec.ranks, [sys.executable, str(SCRIPTS / "between_nodes.py")], cluster=spec), find())
    result(subprocess.CompletedProcess([], code, *capfd.readouterr()))


@emulated
@pytest.mark.parametrize(("text", "least", "most"), [("2x1@1gbit", 1.0, 1.1), ("2x2@1gbit", 1.0, 1.6)])
def test_the_bytes_of_an_all_reduce_cross_the_link(text, least, most, tmp_path, capfd, monkeypatch):
    """Each node must send what the others lack, the whole message if there are two; a ring over 2 × 2 ranks sends it
    1.5 times. Shared memory between the nodes, which MPI would prefer, would show as less.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    spec, size = ClusterSpec.parse(text), 8 * MIB
    command = [sys.executable, str(SCRIPTS / "crosses_links.py"), str(size)]
    code = run(Job(spec.ranks, command, cluster=spec, record=tmp_path / "record"), find())
    ranks = result(subprocess.CompletedProcess([], code, *capfd.readouterr()))["ranks"]
    assert [rank["host"] for rank in ranks] == [name for name in spec.names for _ in range(spec.ranks_per_node)]
    assert [int(rank["local"]) for rank in ranks] == [*range(spec.ranks_per_node)] * spec.nodes
    for rank in ranks:
        for sent in rank["sent"].values():
            assert least * size <= sent <= most * size, ranks
    links = json.loads((tmp_path / "record" / "links.json").read_text())
    assert (links["rate_bits"], links["latency_s"]) == (10**9, 0)
    for link, name in zip(links["nodes"], spec.names, strict=True):
        assert (link["name"], link["ranks"]) == (name, spec.ranks_of(name))
        assert 2 * least * size <= link["sent"] <= 2 * most * size
        assert 2 * least * size <= link["received"] <= 2 * most * size


@emulated
def test_two_levels_between_nodes(capfd, monkeypatch):
    """Equal to one process, and what crosses the link is no more than must."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ECHELON_ROUTE", "mpi+two-level")
    spec, size = ClusterSpec.parse("2x2@1gbit"), 8 * MIB
    command = [sys.executable, str(SCRIPTS / "two_levels.py"), str(size)]
    code = run(Job(spec.ranks, command, cluster=spec), find())
    told = result(subprocess.CompletedProcess([], code, *capfd.readouterr()))
    assert told["nodes"] == [0, 0, 1, 1]
    assert size <= told["sent"] <= 1.06 * size


def descendants(process: int) -> set[int]:
    """All processes below this one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below = {process}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {process}


def networks(processes: set[int]) -> set[str]:
    """The network namespaces of these processes."""
    found = set()
    for process in processes:
        try:
            found.add(os.readlink(f"/proc/{process}/ns/net"))
        except OSError:
            continue
    return found


def everybody() -> set[int]:
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*")}


def rank_1(processes: set[int]) -> int:
    """The one of these that is rank 1 itself, and not a shell or daemon above it."""
    marks = {b"PMI_RANK=1", b"OMPI_COMM_WORLD_RANK=1"}
    [rank] = [p for p in processes if marks & set(Path(f"/proc/{p}/environ").read_bytes().split(b"\0"))]
    return rank


@emulated
@pytest.mark.parametrize(
    ("who", "number", "codes"),
    [
        ("rank", signal.SIGINT, {130}),  # raises KeyboardInterrupt there
        ("rank", signal.SIGKILL, None),
        ("launcher", signal.SIGINT, None),
        ("launcher", signal.SIGTERM, None),
        ("launcher", signal.SIGKILL, {-9}),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_everything_is_taken_down(who, number, codes, tmp_path):
    """Whether the script raises, a rank is killed, or the launcher is stopped or killed itself."""
    before = machine()
    command = [sys.executable, "-m", "echelon.cli", "run", "--cluster", "2x1@1gbit", SCRIPTS / "ends.py", "sleeps"]
    own = environment(TMPDIR=str(tmp_path))
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=own, cwd=ROOT)
    while (line := job.stdout.readline()) != "SLEEPING\n":
        assert line, "the job ended by itself"
    processes = descendants(job.pid)
    made = networks(processes) - networks({os.getpid()})
    assert len(made) == 3  # two nodes and the head
    assert machine() == before
    os.kill(job.pid if who == "launcher" else rank_1(processes), number)
    code = job.wait(30)
    job.stdout.close()
    assert code in codes if codes else code != 0, code
    deadline = time.monotonic() + 15
    while (any(map(alive, processes)) or networks(everybody()) & made) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [process for process in processes if alive(process)]
    assert not networks(everybody()) & made
    assert not list(tmp_path.iterdir())
    assert machine() == before


@emulated
@pytest.mark.parametrize(("how", "codes"), [("exits", {7}), ("vanishes", {1, 8, 14})])
def test_exit_code_and_report(how, codes):
    """As without a cluster: the watch is kept outside of the nodes, and sees them. (With several hosts MPICH's launcher
    does not notice that a rank vanished: the others do, and say 1. Under Open MPI another rank may see the closed
    socket before the launcher sees the end, and abort with 14.)
    """
    job = echelon("run", "--cluster", "2x1@1gbit", SCRIPTS / "ends.py", how, timeout=60)
    assert job.returncode in codes, job.stderr
    assert "rank 1 " in job.stderr.split("echelon: ")[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cluster", "2by2"), "'2by2' is not a cluster: 2x2@1gbit is"),
        (("--cluster", "2x2@1gbit", "-n", 3), "leave -n and --hosts out"),
    ],
)
def test_what_is_wrong_is_said(options, words):
    job = echelon("run", *options, SCRIPTS / "ends.py", "ends well")
    assert job.returncode == 1
    assert words in job.stderr
