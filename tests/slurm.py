"""A real Slurm of one node, for the tests that need one: Debian's slurm-wlm and munge, as root."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.launch.find import find
from tests.launch.jobs import run

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of this machine alone; what its commands need in their environment."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Debian's slurm-wlm and munge (missing: {', '.join(missing) or 'root'})")
    if find().family != "MPICH":
        pytest.skip("Debian's Slurm has no pmix plugin that loads, so Open MPI cannot be started by srun here")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for parent in folder.parents[:2]:
        parent.chmod(0o755)
    with contextlib.ExitStack() as daemons:
        munge = _munge(folder, daemons)
        configuration = _configuration(folder, munge)
        environment = {"SLURM_CONF": str(configuration), "PATH": _PATH}
        for daemon in ("slurmctld", "slurmd"):
            _start([daemon, "-D", "-f", str(configuration)], folder / f"{daemon}.log", daemons)
        _until_idle(environment, folder)
        yield environment


def _munge(folder: Path, daemons: contextlib.ExitStack) -> Path:
    """The daemon that Slurm authenticates with, on a key and a socket of its own."""
    home = folder / "munge"
    home.mkdir()
    key = home / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for path in (home, key):
        shutil.chown(path, "munge", "munge")
    options = [f"--{name}-file={home / name}" for name in ("pid", "log", "seed", "key")]
    user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
    _start([*user, "munged", "-F", f"--socket={home / 'socket'}", *options], folder / "munged.log", daemons)
    _until((home / "socket").exists, "munged did not open its socket", folder)
    return home / "socket"


def _configuration(folder: Path, munge: Path) -> Path:
    """Job numbers begin anywhere: MPICH names its shared memory after them, and a killed job leaves its own behind.
    Credentials expire soon, since a job that was requeued waits until its old ones have.
    """
    host = socket.gethostname().split(".")[0]
    with contextlib.ExitStack() as sockets:
        ports = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    path = folder / "slurm.conf"
    path.write_text(f"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmi2
SelectType=select/cons_tres
ReturnToService=2
FirstJobId={secrets.randbelow(1_000_000) + 1}
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    return path


def _start(command: list[str], log: Path, daemons: contextlib.ExitStack) -> None:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"PATH": _PATH})

    def stop() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    daemons.callback(stop)


def _until_idle(environment: dict[str, str], folder: Path) -> None:
    def idle() -> bool:
        return run("sinfo", "--noheader", "--format=%t", **environment).stdout.strip() == "idle"

    _until(idle, "the Slurm node did not become idle", folder)


def _until(condition, message: str, folder: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.log"))
            raise RuntimeError(f"{message}\n{logs}")
        time.sleep(0.1)
