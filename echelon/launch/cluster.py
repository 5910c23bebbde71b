"""A cluster on one machine: nodes with a host name, a network link, processes and shared memory of their own.

A node is a set of the kernel's namespaces. All nodes hang, each by a link of the given rate, on a bridge in one more
such set, the head, where MPI's launcher runs and the watch listens. No namespace has a name, and no interface is ever
made outside of them: they exist while a process holds them, and that process ends when its input does, which is when
the launcher has gone, in whatever way. So nothing can be left behind, not even by a launcher that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_EXAMPLE = "2x2@1gbit is two nodes of two ranks each, joined by links of 1 Gbit/s; 2x2@1gbit+1ms adds 1 ms of latency"
_SPECIFICATION = re.compile(
    r"(?P<nodes>\d+)x(?P<ranks>\d+)@(?P<rate>\d+(?:\.\d+)?)(?P<unit>[kmg])bit(?:\+(?P<time>\d+(?:\.\d+)?)(?P<scale>us|ms|s))?",
    re.IGNORECASE,
)
_BITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_IN_A_SECOND = {"us": 10**6, "ms": 10**3, "s": 1}
_PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "taskset"), "mount": ("mount",)}
_NETWORK = ipaddress.IPv4Network("10.0.0.0/16")
_HEAD, _HEAD_ADDRESS = "head", _NETWORK[-2]
_FRAME = 1514
_OWN = ("--net", "--uts", "--mount")  # what the head has of its own
# A node also has these: UCX takes all who share the first for neighbours, and would move their messages through shared
# memory, past the link; the end of the first process in the second ends all others.
_NODES_OWN = ("--ipc", "--pid")
_HOLD = Path(__file__).with_name("node.sh")


class NoCluster(RuntimeError):
    """The cluster cannot be had; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What a cluster is to be: links carry `rate_bits` a second each way, and delay every message by `latency_s`."""

    nodes: int
    ranks_per_node: int
    rate_bits: int
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Read `2x2@1gbit` or `2x2@1gbit+1ms`."""
        found = _SPECIFICATION.fullmatch(text.strip())
        if found is None:
            raise NoCluster(f"{text!r} is not a cluster: {_EXAMPLE}")
        spec = cls(
            int(found["nodes"]),
            int(found["ranks"]),
            int(float(found["rate"]) * _BITS[found["unit"].lower()]),
            float(found["time"]) / _IN_A_SECOND[found["scale"].lower()] if found["time"] else 0.0,
        )
        if not (spec.nodes and spec.ranks_per_node and spec.rate_bits):
            raise NoCluster(f"{text!r} has no nodes, no ranks or no rate: {_EXAMPLE}")
        return spec

    @classmethod
    def asked(cls, text: str, ranks: int | None, hosts: Sequence[str]) -> ClusterSpec | None:
        """What --cluster asks for, if it does, beside -n and --hosts, which it leaves no room for."""
        if not text:
            return None
        spec = cls.parse(text)
        if hosts or ranks not in (None, spec.ranks):
            raise NoCluster(f"--cluster {text} has {spec.ranks} ranks on {spec.nodes} nodes: leave -n and --hosts out")
        return spec

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' host names."""
        return tuple(f"n{number + 1}" for number in range(self.nodes))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes as MPI's launchers want them told, with the ranks that each has room for."""
        return tuple(f"{name}:{self.ranks_per_node}" for name in self.names)

    @property
    def link(self) -> str:
        """What joins the nodes, in words."""
        latency = f" + {self.latency_s * 1e6:g} us" if self.latency_s else ""
        return f"{self.rate_bits / 1e6:g} Mbit/s{latency}"

    def ranks_of(self, name: str) -> list[int]:
        first = self.names.index(name) * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What one node has sent and received over its link until now, with the headers of the frames."""

    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that is up. `agent` starts a command on a node, as `ssh` would: `agent NODE COMMAND`."""

    spec: ClusterSpec
    agent: Path
    _head: int  # the process that holds it

    def from_head(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on the head, which can reach all nodes."""
        return [*_enter(self._head, *_OWN), "--wd", *command]

    def environment(self) -> dict[str, str]:
        """What makes MPI's launchers (Hydra, Open MPI 5, Open MPI 4) use the agent, and from the head alone.

        Open MPI names folders by process numbers, which are the same on all nodes: they must not share the place.
        """
        return {
            "HYDRA_LAUNCHER": "rsh",
            "HYDRA_LAUNCHER_EXEC": str(self.agent),
            "PRTE_MCA_plm_ssh_agent": str(self.agent),
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            "PRTE_MCA_prte_tmpdir_base": "/dev/shm",
            "OMPI_MCA_plm_rsh_agent": str(self.agent),
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
            "OMPI_MCA_orte_tmpdir_base": "/dev/shm",
        }

    def listen(self) -> socket.socket:
        """A socket of this process that listens on the head, where only the nodes can reach it."""

        def on_head() -> socket.socket:
            with Path(f"/proc/{self._head}/ns/net").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "the head's network cannot be entered")
            return socket.create_server((str(_HEAD_ADDRESS), 0), backlog=1024)

        with ThreadPoolExecutor(1) as thread:  # a thread is in a network by itself
            return thread.submit(on_head).result()

    def link_bytes(self) -> dict[str, LinkBytes]:
        """The counters of every node's link, by the node's name, as the bridge sees them."""
        links = json.loads(_run([*_enter(self._head, "--net"), "ip", "-json", "-statistics", "link"]))
        counted = {link["ifname"]: link["stats64"] for link in links}
        return {name: LinkBytes(counted[name]["rx"]["bytes"], counted[name]["tx"]["bytes"]) for name in self.spec.names}


@contextlib.contextmanager
def cluster(spec: ClusterSpec, shared: Sequence[Path] = ()) -> Iterator[Cluster]:
    """Build the cluster, and take it down. Nodes see the machine's files, but of /dev/shm only the folders `shared`."""
    if why := obstacle():
        raise NoCluster(f"an emulated cluster {why}")
    folder = Path(tempfile.mkdtemp(prefix="echelon-cluster-"))
    try:
        (folder / "memory").mkdir()
        addresses = dict(zip(spec.names, _NETWORK.hosts(), strict=False)) | {_HEAD: _HEAD_ADDRESS}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        with contextlib.ExitStack() as holders:
            head = holders.enter_context(_held(_HEAD, _OWN, folder, shared))
            nodes = {
                name: holders.enter_context(_held(name, (*_OWN, *_NODES_OWN), folder, shared)) for name in spec.names
            }
            _link(spec, head, nodes, addresses)
            yield Cluster(spec, _write_agent(spec, folder / "agent", nodes), head)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def obstacle() -> str:
    """Why there can be no emulated cluster here, and what to do; empty where there can be one."""
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces: run as root (sudo)"
    missing = {name: package for package, names in _PACKAGES.items() for name in names if shutil.which(name) is None}
    if missing:
        packages = " ".join(dict.fromkeys(missing.values()))
        return f"needs {', '.join(missing)}: install {packages} (Debian, Ubuntu: apt-get install {packages})"
    tried = subprocess.run(
        ["unshare", *_OWN, *_NODES_OWN, "--fork", "mount", "-t", "sysfs", "sysfs", "/sys"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"is not permitted here ({tried.stderr.strip()}): a container must be started with --privileged"
    return ""


@contextlib.contextmanager
def _held(name: str, namespaces: Sequence[str], folder: Path, shared: Sequence[Path]) -> Iterator[int]:
    """Namespaces that exist as long as this context; gives the number of the process that holds them."""
    fork = ["--fork", "--kill-child"] if "--pid" in namespaces else []
    with subprocess.Popen(
        ["unshare", *namespaces, *fork, "sh", _HOLD, name, folder, *shared],
        stdin=subprocess.PIPE,  # closed at the end of this context, or with this process: so ends the holder
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C does not reach it: the job needs its network to end well
    ) as holder:
        assert holder.stdout is not None
        told = holder.stdout.readline().strip()
        if not told.isdigit():
            raise NoCluster(f"the cluster's {name} could not be made: {told or 'it ended at once'}")
        yield int(told)


def _link(spec: ClusterSpec, head: int, nodes: dict[str, int], addresses: dict[str, ipaddress.IPv4Address]) -> None:
    """A bridge on the head, and from every node a link to it, slowed down at both ends."""
    on_head, length = _enter(head, "--net"), _NETWORK.prefixlen
    bridge = ["link add hub type bridge mcast_snooping 0", f"address add {addresses[_HEAD]}/{length} dev hub"]
    for name, process in nodes.items():
        bridge.append(f"link add {name} type veth peer name eth0 netns {process}")
        bridge.append(f"link set {name} master hub up")
    _run([*on_head, "ip", "-batch", "-"], "\n".join([*bridge, "link set hub up"]))
    _run([*on_head, "tc", "-batch", "-"], "\n".join(f"qdisc add dev {name} {_limit(spec)}" for name in nodes))
    for name, process in nodes.items():
        on_node = _enter(process, "--net")
        _run([*on_node, "ip", "-batch", "-"], f"address add {addresses[name]}/{length} dev eth0\nlink set eth0 up")
        _run([*on_node, "tc", "qdisc", "add", "dev", "eth0", *_limit(spec).split()])
        if spec.latency_s:
            _delay(on_node, spec.latency_s)


def _limit(spec: ClusterSpec) -> str:
    """A bucket of tokens: after a rest, what a millisecond would carry passes at once (with less, a late timer would
    slow the link down). The queue is that of a switch: 20 ms, or the largest piece that TCP hands over, several times.
    """
    bytes_a_second = spec.rate_bits // 8
    burst, queue = max(bytes_a_second // 1000, 2 * _FRAME), max(bytes_a_second // 50, 4 * 65536)
    return f"root handle 1: tbf rate {spec.rate_bits}bit burst {burst} limit {queue}"


def _delay(on_node: list[str], seconds: float) -> None:
    """At the sender, so that every message between nodes meets it once."""
    try:
        _run([*on_node, *f"tc qdisc add dev eth0 parent 1:1 netem delay {round(seconds * 1e6)}us limit 100000".split()])
    except NoCluster as error:
        if "unknown" not in str(error):
            raise
        raise NoCluster(
            f"a latency needs the kernel's netem, which this kernel ({os.uname().release}) has not: "
            "load it (modprobe sch_netem), or leave the latency out"
        ) from None


def _write_agent(spec: ClusterSpec, agent: Path, nodes: dict[str, int]) -> Path:
    lines = []
    for number, (name, process) in enumerate(nodes.items()):
        command = [*_on_cores(spec, number), *_enter(process, *_OWN, *_NODES_OWN), "--wd"]
        lines.append(f'{name}) shift; exec {shlex.join(command)} sh -c "$*" ;;')
    agent.write_text("\n".join(["#!/bin/sh", "case $1 in", *lines, 'esac; echo "no node $1" >&2; exit 1\n']))
    agent.chmod(0o700)
    return agent


def _on_cores(spec: ClusterSpec, number: int) -> list[str]:
    """Where there are cores enough, each node has its own, and its ranks share those (identity.take_cores)."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // spec.nodes
    if share // spec.ranks_per_node < 2:
        return []
    return ["taskset", "-c", ",".join(map(str, cores[number * share : (number + 1) * share]))]


def _enter(process: int, *namespaces: str) -> list[str]:
    return ["nsenter", "--target", str(process), *namespaces]


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCluster(f"the cluster could not be built: {shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout
