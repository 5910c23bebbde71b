"""Starting ranks with the machine's MPI, and ending them: `echelon run`.

The job runs in a session of its own. Signals are passed on once; whatever is still alive when the launcher has ended,
or does not end when told to, is killed, so that no process stays behind. Meanwhile the watch is kept here, since MPI's
launchers kill the survivors of a dead rank at once: when the job has failed, this process can still say what happened.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from echelon.launch.cluster import Cluster, ClusterSpec, cluster
from echelon.launch.find import Installation
from echelon.launch.logbook import FOLDER_VARIABLE
from echelon.launch.report import exit_code, post_mortem
from echelon.launch.watch import VARIABLE, Watch

RECORD_VARIABLE = "ECHELON_RECORD"
LINK_VARIABLE = "ECHELON_LINK"  # what joins the nodes of an emulated cluster
_JOB_VARIABLE = "ECHELON_JOB"  # marks every process of a job, wherever its launcher put it
_GRACE_SECONDS = 5.0
_NEW_SECONDS = 600.0  # within which all ranks of a job have opened the memory that one made, those in containers, too
WARNINGS = {signal.SIGUSR1, signal.SIGUSR2}  # what schedulers send before they end a job, if they are told to
_OPEN_MPI_TAG = re.compile(rb"^\[[^\]]*,(\d+)\]<std(?:out|err)>:\s?")


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: `command` on `ranks` ranks, on this machine or spread over `hosts` (each `name` or `name:ranks`).

    Or on this machine, divided into the nodes of a `cluster`. `record` is where the ranks record what they send.
    A job that looks for the file `stop` now and then, and leaves when it is there, is asked so to end by the first
    signal, and has `stop_seconds` to do so. `refusal` is the exit code by which all ranks say that what was asked
    for cannot be, and that they have told why: nothing is reported of them.
    """

    ranks: int
    command: Sequence[str]
    hosts: tuple[str, ...] = ()
    prefix_output: bool = False
    cluster: ClusterSpec | None = None
    record: Path | None = None
    stop: Path | None = None
    stop_seconds: float = 300.0
    refusal: int | None = None

    def __post_init__(self) -> None:
        if self.cluster is not None and (self.hosts or self.ranks != self.cluster.ranks):
            raise ValueError(f"a job on {self.cluster} has its {self.cluster.ranks} ranks, and no other hosts")

    @property
    def ranks_per_host(self) -> int:
        """How many share a real machine: an emulated cluster is one."""
        return math.ceil(self.ranks / max(len(self.hosts), 1))


def run(job: Job, mpi: Installation, meanwhile: contextlib.AbstractContextManager[Any] | None = None) -> int:
    """Run the job to its end and return its exit code: that of the rank that failed, if one did.

    `meanwhile` is entered when the job has begun: a thread that this process had before would not be safe.
    """
    identifier = uuid.uuid4().hex
    _remove_leftovers()
    with (
        tempfile.TemporaryDirectory(prefix=f"echelon-{os.getpid()}-", dir=memory_folder()) as folder,
        _cluster_of(job, Path(folder)) as nodes,
    ):
        watch = Watch(Path(folder), elsewhere=bool(job.hosts), listener=nodes.listen() if nodes else None)
        marks = {_JOB_VARIABLE: identifier, VARIABLE: watch.address, FOLDER_VARIABLE: folder}
        marks |= {RECORD_VARIABLE: str(job.record.absolute())} if job.record else {}
        marks |= {LINK_VARIABLE: job.cluster.link} if job.cluster else {}
        command = command_line(job, mpi)
        if nodes:
            command, marks = nodes.from_head(command), marks | nodes.environment()
        process = subprocess.Popen(
            command,
            env=dict(os.environ) | rank_environment(job, mpi) | marks,
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            stdout=subprocess.PIPE if job.prefix_output else None,
            stderr=subprocess.STDOUT if job.prefix_output else None,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 (this process has one thread, as yet)
        )
        watch.start()
        threading.Thread(target=_see_to_the_end, args=(process, identifier, watch), daemon=True).start()
        try:
            with _signals_passed_to(process, job) as received, meanwhile or contextlib.nullcontext():
                if process.stdout is not None:
                    _print_prefixed(process.stdout)
                code = _exit_code(process.wait())
            if nodes and job.record:
                _write_links(nodes, job.record)
            watch.close()
            sight = watch.sight()
            if received or not sight.states:
                return code
            code = exit_code(sight, code)
            if code and code != job.refusal:
                print(f"echelon: {post_mortem(sight, code)}", file=sys.stderr, flush=True)
            return code
        finally:
            _kill_rest(process, identifier)
            _remove_leftovers()


def command_line(job: Job, mpi: Installation) -> list[str]:
    """The launcher's command for the job, with the flags it needs (none to bind: ranks take their cores themselves)."""
    hosts = job.cluster.hosts if job.cluster else job.hosts
    if mpi.family == "Open MPI":
        flags = ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            flags.append("--allow-run-as-root")
        if hosts:
            flags += ["--host", ",".join(hosts)]
            ours = [_JOB_VARIABLE, VARIABLE, FOLDER_VARIABLE]
            ours += [RECORD_VARIABLE] * bool(job.record) + [LINK_VARIABLE] * bool(job.cluster)
            ours += sorted(name for name in os.environ if name.startswith("ECHELON_"))  # ECHELON_ROUTE and others
            for name in dict.fromkeys((*_defaults(job, mpi), *ours)):
                flags += ["-x", name]
        if job.prefix_output:
            flags.append("--tag-output")
    else:
        flags = []
        if hosts:
            flags += ["-hosts", ",".join(hosts)]
        if job.prefix_output:
            flags.append("-prepend-rank")
    return [str(mpi.mpiexec), *flags, "-n", str(job.ranks), *job.command]


def rank_environment(job: Job, mpi: Installation) -> dict[str, str]:
    """Variables for the ranks, where the user has not set them."""
    return {name: value for name, value in _defaults(job, mpi).items() if name not in os.environ}


def _defaults(job: Job, mpi: Installation) -> dict[str, str]:
    return mpi.environment() | {
        "OMP_NUM_THREADS": str(cores_per_rank(job)),
        "OMPI_MCA_mpi_yield_when_idle": "1",  # see echelon.comm.world
    }


def cores_per_rank(job: Job) -> int:
    """This machine's cores, shared among the ranks of a host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // job.ranks_per_host, 1)


def memory_folder() -> Path:
    """Where a file costs no disk."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def _remove_leftovers() -> None:
    """What launchers and ranks that were killed could not remove themselves: the folders of the former, and shared
    memory of MPICH that nobody has open. Processes in containers cannot be seen; a name is needed only until all ranks
    have opened it, so what is new stays.
    """
    if not Path("/proc/self").exists():
        return
    for folder in memory_folder().glob("echelon-*-*"):
        number = folder.name.split("-")[1]
        if number.isdigit() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    unused = [path for path in memory_folder().glob("mpich_shm_*") if _age(path) > _NEW_SECONDS]
    for maps in Path("/proc").glob("[0-9]*/maps") if unused else ():
        with contextlib.suppress(OSError):
            mapped = maps.read_bytes()
            unused = [path for path in unused if os.fsencode(path) not in mapped]
    for path in unused:
        with contextlib.suppress(OSError):  # another user's, whose processes cannot be seen
            path.unlink()


def _age(path: Path) -> float:
    """Seconds since it was made; none if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _cluster_of(job: Job, folder: Path) -> contextlib.AbstractContextManager[Cluster | None]:
    """The cluster that the job is to run on, if any; its nodes can see the logbooks and the record."""
    if job.cluster is None:
        return contextlib.nullcontext()
    if job.record is None:
        return cluster(job.cluster, [folder])
    job.record.mkdir(parents=True, exist_ok=True)
    return cluster(job.cluster, [folder, job.record.resolve()])


def _write_links(nodes: Cluster, record: Path) -> None:
    """What has crossed every node's link, beside what the ranks have recorded."""
    counted = nodes.link_bytes()
    links = {
        "rate_bits": nodes.spec.rate_bits,
        "latency_s": nodes.spec.latency_s,
        "nodes": [{"name": n, "ranks": nodes.spec.ranks_of(n)} | asdict(link) for n, link in counted.items()],
    }
    (record / "links.json").write_text(json.dumps(links, indent=1) + "\n")


def _end_with_parent() -> None:
    """Runs in the new process: have it ended if `echelon run` itself is killed and can pass nothing on."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@contextlib.contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes], job: Job) -> Iterator[list[int]]:
    """Pass Ctrl-C and termination on to the launcher, or ask the job to stop; after the second, or a grace period, the
    job is killed.

    Gives the list that holds those received.
    """
    received: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        if job.stop is not None:
            job.stop.touch()
            print("echelon: asked the job to stop; a second signal ends it at once", file=sys.stderr, flush=True)
        else:
            process.send_signal(number)
        signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS if job.stop is None else job.stop_seconds)

    def give_up(_number: int, _frame: object) -> None:
        process.kill()

    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} | (WARNINGS if job.stop is not None else set())
    handlers = {number: signal.signal(number, pass_on) for number in numbers}
    handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, give_up)
    try:
        yield received
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _print_prefixed(lines: IO[bytes]) -> None:
    """Both launchers mark lines with their rank; Open MPI's longer mark is brought to MPICH's form, `[rank] line`."""
    for line in lines:
        sys.stdout.buffer.write(_OPEN_MPI_TAG.sub(rb"[\1] ", line))
        sys.stdout.buffer.flush()


def _exit_code(status: int) -> int:
    return 128 - status if status < 0 else status


def _see_to_the_end(process: subprocess.Popen[bytes], identifier: str, watch: Watch) -> None:
    """A job that has failed ends, even if MPI's launcher does not notice that a rank has left."""
    while process.poll() is None:
        time.sleep(0.5)
        if watch.since_failure() > _GRACE_SECONDS:
            _kill_rest(process, identifier)


def _kill_rest(process: subprocess.Popen[bytes], identifier: str) -> None:
    """Kill every process of the job that is still alive, the launcher included."""
    for _ in range(20):
        rest = [pid for pid in _processes_of(identifier) if pid != os.getpid()]
        if process.poll() is None:
            rest.append(process.pid)
        if not rest:
            return
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.05)


def _processes_of(identifier: str) -> Iterator[int]:
    """This machine's processes that carry the job's mark in their environment."""
    mark = f"{_JOB_VARIABLE}={identifier}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                mark in (folder / "environ").read_bytes().split(b"\0")
                and "\nState:\tZ" not in (folder / "status").read_text()
            ):
                yield int(folder.name)
