"""Ranks that are started once and run many tests: starting MPI and importing torch costs seconds, a test milliseconds.

A test hands a function of its module to `Pool.run`; every rank calls it, and what they return comes back as a list.
The ranks hold one process group over the backend `echelon` for as long as they live. When a test fails, hangs or
kills a rank, the pool is thrown away with everything it may have left behind, and the next test starts a new one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from echelon.launch.find import find
from echelon.launch.start import Job, command_line, rank_environment

START_SECONDS = 120
GRACE_SECONDS = 5


def alive(process: int) -> bool:
    """Whether a process runs: it exists, and is not just a zombie that its parent has not collected yet."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


class RankError(AssertionError):
    """A test failed on some ranks: with what each of them said."""


class Pool:
    """`size` ranks, started when first used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[Connection] = []
        self._processes: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        """Call `function(*arguments)` on every rank; return what each returned, or raise what they raised."""
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.send((function.__module__, function.__qualname__, arguments))
        answers = self._answers(timeout)
        failures = [f"rank {rank}: {text}" for rank, (good, text) in sorted(answers.items()) if not good]
        missing = [rank for rank in range(self.size) if rank not in answers]
        if missing:
            failures.append(
                f"rank {', '.join(map(str, missing))}: no answer after {timeout:g} s, or after another rank had failed"
            )
        if failures:
            self.stop()
            raise RankError("\n".join(failures))
        return [answers[rank][1] for rank in range(self.size)]

    def stop(self) -> None:
        """End the ranks, gently if they are idle, and be sure that they are gone."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.send(None)
                rank.close()
        self._ranks = []
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        while left := [process for process in self._processes if alive(process)]:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        self._processes = []

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            host, port = listener.address
            job = Job(self.size, [sys.executable, "-m", "tests.rank", host, str(port)])
            mpi = find()
            environment = (
                dict(os.environ) | rank_environment(job, mpi) | {"OMP_NUM_THREADS": "1", "TESTS_RANK_KEY": key.hex()}
            )
            self._process = subprocess.Popen(
                command_line(job, mpi), env=environment, start_new_session=True, stdin=subprocess.DEVNULL
            )
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            connections = [listener.accept() for _ in range(self.size)]
        introduced = [(*connection.recv(), connection) for connection in connections]
        self._processes = [process for _, process, _ in introduced]
        self._ranks = [connection for _, _, connection in sorted(introduced, key=lambda rank: rank[0])]

    def _answers(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size and (remaining := deadline - time.monotonic()) > 0:
            waiting = [connection for rank, connection in enumerate(self._ranks) if rank not in answers]
            for connection in wait(waiting, remaining):
                rank = self._ranks.index(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    answers[rank] = False, "died"
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers
