"""Who is still there: one process keeps a line to every rank and the latest state of each.

The launcher keeps the watch under `echelon run`; where there is none of ours, rank 0 does. A line that breaks without
a farewell is a rank that died, and the first to fall is the one that began it: the kernel hands them over in order.
Lines carry JSON, one message a line; whoever does not know the job's token is sent away.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.launch import logbook
from echelon.launch.logbook import RankState

VARIABLE = "ECHELON_WATCH"  # where the watch is kept, and its token; for the ranks that `echelon run` starts
_ANSWER_SECONDS = 10.0
_FIRST_WORDS = 1024  # bytes that a visitor may say before it has shown the token


@dataclass(frozen=True, slots=True)
class Sight:
    """What the watch knows: every rank's state; the ranks that died or failed, in that order; the failure handed in."""

    states: dict[int, RankState]
    fallen: list[int]
    failure: str = ""


class Watch:
    """The keeper's side. `folder` is where ranks of this machine have their logbooks, if it is shared with them."""

    def __init__(
        self, folder: Path | None = None, *, elsewhere: bool = False, listener: socket.socket | None = None
    ) -> None:
        """`elsewhere`: whether ranks on other machines must be able to come in; `listener`: where else they come in."""
        self._folder = folder
        self._listener = listener or socket.create_server(("" if elsewhere else "127.0.0.1", 0), backlog=1024)
        self._token = secrets.token_hex(16)
        host, port = self._listener.getsockname()
        self.address = f"{socket.gethostname() if elsewhere else host}:{port}:{self._token}"
        self._latest: dict[int, Any] = {}
        self._fallen: list[int] = []
        self._failure = ""
        self._failed = math.inf
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, waker = socket.socketpair()
        self._selector.register(waker, selectors.EVENT_READ)
        os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(target=self._serve, name="echelon-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look at what has come in until now, and stop."""
        self._wake.close()
        self._thread.join()
        self._selector.close()
        self._listener.close()

    def since_failure(self) -> float:
        """Seconds since a rank handed in why the job fails; less than 0 if none has."""
        return time.monotonic() - self._failed

    def sight(self) -> Sight:
        snapshots = dict(self._latest)
        if self._folder is not None:
            snapshots = {rank: logbook.read(self._folder / str(rank)) or told for rank, told in snapshots.items()}
        states = {rank: RankState.of(snapshot) for rank, snapshot in sorted(snapshots.items())}
        return Sight(states, list(self._fallen), self._failure)

    def _serve(self) -> None:
        _allow_many_connections()
        closing = False
        while not closing:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        connection, _address = self._listener.accept()
                        connection.settimeout(_ANSWER_SECONDS)
                        self._selector.register(connection, selectors.EVENT_READ, _Visitor(connection))
                elif key.data is None:
                    closing = True
                else:
                    self._hear(key.data)

    def _hear(self, visitor: _Visitor) -> None:
        try:
            messages = visitor.read()
            for message in messages:
                self._answer(visitor, message)
        except Exception:  # gone, or talking nonsense
            self._selector.unregister(visitor.connection)
            visitor.connection.close()
            if visitor.rank is not None and not visitor.leaving:
                self._fallen.append(visitor.rank)

    def _answer(self, visitor: _Visitor, message: dict[str, Any]) -> None:
        if visitor.rank is None:
            if not hmac.compare_digest(str(message["token"]), self._token):
                raise ValueError("a visitor without the token")
            visitor.rank = int(message["rank"])
        if "state" in message:
            RankState.of(message["state"])  # only what can be read is kept
            self._latest[visitor.rank] = message["state"]
        if "failure" in message:
            visitor.say({"first": not self._failure})
            if not self._failure:
                self._failure, self._failed = str(message["failure"]), time.monotonic()
        if "farewell" in message:
            visitor.leaving = True
            if RankState.of(message["state"]).code:
                self._fallen.append(visitor.rank)
        if "ask" in message:
            states = [_about(snapshot, message["groups"]) for snapshot in self._latest.values()]
            visitor.say({"ask": message["ask"], "states": states, "fallen": self._fallen})

    def _forget(self) -> None:
        """In a forked child: leave the lines to the parent, whose end would otherwise go unnoticed."""
        for key in list((self._selector.get_map() or {}).values()):  # None: closed already
            with contextlib.suppress(OSError):
                os.close(key.fd)


class _Visitor:
    """One rank's line, as the watch sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.leaving = False
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        data = self.connection.recv(2**20)
        if not data:
            raise ConnectionResetError
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self.rank is None and max(map(len, [*lines[:1], self._rest])) > _FIRST_WORDS:
            raise ValueError("a long speech from a stranger")
        return [json.loads(line) for line in lines]

    def say(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")


class Line:
    """A rank's side. One thread at a time speaks; a process that the rank forks hangs up at once."""

    def __init__(self, address: str, rank: int) -> None:
        host, port, token = address.rsplit(":", 2)
        self._socket = socket.create_connection((host, int(port)), _ANSWER_SECONDS)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._heard = b""
        self._asked = 0
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self.hang_up)
        self._say({"token": token, "rank": rank})

    def hang_up(self) -> None:
        """Takes no lock: in a forked child another thread may have held it."""
        os.close(self._socket.detach())

    def tell(self, snapshot: dict[str, Any]) -> None:
        with self._lock:
            self._say({"state": snapshot})

    def ask(self, groups: list[str] | None = None) -> Sight:
        """What the watch knows of all ranks, in all groups or in those of these names.

        A TimeoutError tells nothing about anybody: the watch may be busy, or stopped.
        """
        with self._lock:
            self._asked += 1
            self._say({"ask": self._asked, "groups": groups})
            answer = self._listen()
            while answer.get("ask") != self._asked:  # late, to a question given up before
                answer = self._listen()
        states = [RankState.of(snapshot) for snapshot in answer["states"]]
        return Sight({state.rank: state for state in states}, answer["fallen"])

    def fail(self, text: str) -> bool:
        """Hand in why the job fails; True for the first who does."""
        with self._lock:
            self._say({"failure": text})
            answer = self._listen()
            while "first" not in answer:
                answer = self._listen()
            return bool(answer["first"])

    def leave(self, snapshot: dict[str, Any]) -> None:
        """A farewell with the last state: what follows is no death."""
        with self._lock, contextlib.suppress(OSError):
            self._say({"state": snapshot, "farewell": True})

    def _say(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> dict[str, Any]:
        while b"\n" not in self._heard:
            data = self._socket.recv(2**20)
            if not data:
                raise ConnectionResetError("the watch has hung up")
            self._heard += data
        line, self._heard = self._heard.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer


def _about(snapshot: dict[str, Any], groups: list[str] | None) -> dict[str, Any]:
    """A snapshot without what was not asked for: in a large job most of it is not."""
    if groups is None:
        return snapshot
    header = snapshot["header"]
    asked = {row: group for row, group in header["groups"].items() if group[0] in groups}
    closed = [pair for pair in header["closed"] if pair[0][0] in groups]
    return {"header": header | {"groups": asked, "closed": closed}, "rows": snapshot["rows"] if asked else []}


def _allow_many_connections() -> None:
    """One for each rank, which may be more than a process may have by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
