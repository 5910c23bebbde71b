"""All groups of this process: what must happen to every one of them when the rank ends, forks or is asked."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from echelon.comm.transports.gpu_memory import outboxes
from echelon.comm.work import PostOffice
from echelon.launch.logbook import Message

if TYPE_CHECKING:
    from echelon.comm.group import EchelonGroup

groups: weakref.WeakSet[EchelonGroup] = weakref.WeakSet()
post_office = PostOffice()


def finish_groups() -> None:
    """Finish what is under way in every group, and stop looking after messages: MPI is about to end."""
    for group in list(groups):
        group.finish()
    outboxes.close()
    post_office.close()


def close_groups() -> None:
    """Close what was never destroyed."""
    for group in list(groups):
        group.shutdown()


def waited_messages() -> dict[int, Message]:
    """The message that each group has been waited in for longest, by the group's row in the logbook."""
    found: dict[int, Message] = {}
    for work in sorted(post_office.waited_for(), key=lambda work: work.waited_for, reverse=True):
        words, row, peer, tag = work.label
        who = "any rank" if peer is None else f"rank {peer}"
        found[row] = Message(work.waited_for, f"{words} {who}{f' (tag {tag})' if tag else ''}", peer)
    return found


def _abandon_groups() -> None:
    for group in list(groups):
        group.abandon()


os.register_at_fork(after_in_child=_abandon_groups)
