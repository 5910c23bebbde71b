"""Never a hang: a thread that notices when this rank waits for what cannot come, and ends the job with the reason.

MPI cannot give up a collective, so neither can the caller inside it; this thread looks on. Five times a second it
reads the rank's own logbook and tells the watch (`launch.watch`) what is new. An operation that stays the same for a
second makes it ask about the others: if a member that has not arrived has died or ended, if the ranks are in different
operations, or if the group's timeout is over, it hands in the reason and the rank leaves, which ends the job.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

from torch.distributed import Store

from echelon.launch import report
from echelon.launch.identity import Identity, identity
from echelon.launch.logbook import FOLDER_VARIABLE, GroupState, Logbook, Message, RankState
from echelon.launch.watch import VARIABLE, Line, Sight, Watch

_INTERVAL = 0.2
_RANKS_AT_THAT_INTERVAL = 64  # with more, each tells less often, so that the watch need not hear more in all
_SUSPICION_SECONDS = 1.0
_QUIET_SECONDS = 3.0  # for the first rank that gives up to have its say before the others leave


@cache
def logbook() -> Logbook:
    """This rank's; in a file where the launcher can read it, if it gave us a place."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    rank = identity().rank
    return Logbook(rank, Path(folder) / str(rank) if Path(folder).is_dir() and folder else None)


class Watchdog:
    """Looks after one rank. `waited_for` tells which messages it waits for; `leave` ends its process."""

    def __init__(
        self, store: Store, waited_for: Callable[[], dict[int, Message]], leave: Callable[[int], NoReturn]
    ) -> None:
        """`store` is that of the world's group: the ranks learn there where the watch is kept."""
        me = identity()
        self._waited_for = waited_for
        self._leave = leave
        self._logbook = logbook()
        self._since: dict[object, float] = {}
        self._suspicion = ""
        self._told: object = None
        self._ending = False
        self._held_by_launcher = VARIABLE in os.environ
        self._interval = _INTERVAL * max(me.size / _RANKS_AT_THAT_INTERVAL, 1)
        self._line = Line(_where(me, store), me.rank)
        self._tell()
        threading.Thread(target=self._look_on, name="echelon-watchdog", daemon=True).start()

    def end(self, how: str, code: int) -> None:
        """This rank ends, in the words of `how`; said while MPI still runs."""
        self._logbook.end(how, code)
        self._line.leave(self._logbook.snapshot())
        self._ending = True

    def refuse(self, text: str, code: int) -> NoReturn:
        """End this rank, and with it the job, for a reason that needs no account of what the ranks were doing."""
        self._logbook.end("refused", code)
        self._hand_in(text)
        self._leave(code)

    def explain_timeout(self, row: int) -> str:
        """Who had not arrived at the operation that is under way in a group, given by its row in the logbook."""
        snapshot = self._logbook.snapshot()
        group = next((group for group in RankState.of(snapshot).groups if group.row == row), None)
        try:
            self._line.tell(snapshot)
            sight = self._line.ask()
        except OSError:
            sight = Sight({}, [])
        if group is None or not sight.states:
            return "not all ranks came within the timeout"
        return f"{report.timed_out(group, sight)}\n{report.account(sight)}"

    def _look_on(self) -> None:
        asked = time.monotonic()
        while True:
            time.sleep(self._interval)
            now = time.monotonic()
            try:
                waits = self._waits(self._tell(), now)
                suspicious = self._ending or any(now - since > _SUSPICION_SECONDS for since in self._since.values())
                if suspicious and now - asked > _SUSPICION_SECONDS * self._interval / _INTERVAL:
                    asked = now
                    self._judge(waits, now, self._line.ask([group.name for group in waits.values()]))
            except TimeoutError:  # the watch is stopped or busy, which says nothing about the ranks
                continue
            except OSError:
                if self._ending:  # as everybody is
                    return
                self._give_up("the watch is gone, and with it the launcher or the rank that kept it")

    def _tell(self) -> RankState:
        self._logbook.note_messages(self._waited_for())
        snapshot = self._logbook.snapshot()
        if snapshot != self._told:
            self._line.tell(snapshot)
            self._told = snapshot
        return RankState.of(snapshot)

    def _waits(self, me: RankState, now: float) -> dict[object, GroupState]:
        """What this rank waits in, under a key that no later operation has."""
        waits: dict[object, GroupState] = {}
        for group in me.groups:
            if group.under_way:
                waits[group.name, group.sequence] = group
            if group.message is not None:
                waits[group.name, "message", group.message.number] = group
        self._since = {key: self._since.get(key, now) for key in waits}
        return waits

    def _judge(self, waits: dict[object, GroupState], now: float, sight: Sight) -> None:
        me = identity().rank
        hopeless = ""
        for key, group in waits.items():
            message = "message" in key  # type: ignore[operator]
            hopeless = hopeless or (
                report.never_comes(group, me, sight) if message else report.never_completes(group, sight)
            )
            patience = math.inf if group.operation == "barrier" and not message else group.timeout
            if now - self._since[key] > patience:
                self._give_up(report.message_timed_out(group) if message else report.timed_out(group, sight))
        if self._ending and sight.fallen:
            hopeless = f"{report.ranks_text(sight.fallen)} died while others were at their end"
        if hopeless and hopeless == self._suspicion:  # seen twice: states arrive late, and not all at once
            self._give_up(hopeless)
        self._suspicion = hopeless

    def _give_up(self, reason: str) -> NoReturn:
        text = reason
        with contextlib.suppress(OSError):
            text = f"{reason}\n{report.account(self._line.ask())}"
        self._hand_in(text)
        self._leave(1)

    def _hand_in(self, text: str) -> None:
        """Why the job fails; the first rank's words are printed, here or by the launcher."""
        first, told = True, False
        with contextlib.suppress(OSError):
            first = self._line.fail(text)
            told = self._held_by_launcher
        if first and not told:
            print(f"echelon: {text}", file=sys.stderr, flush=True)
        if not first:
            time.sleep(_QUIET_SECONDS)


def _where(me: Identity, store: Store) -> str:
    """The watch's address: the launcher's, or that of one that rank 0 begins here."""
    if address := os.environ.get(VARIABLE):
        return address
    if me.rank == 0:
        watch = Watch(elsewhere=me.local_size != me.size)
        watch.start()
        store.set("echelon/watch", watch.address)
    return store.get("echelon/watch").decode()
