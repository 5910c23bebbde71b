"""From what the watch saw to words: who waits for whom, in what, and why that can never end.

Pure functions of the ranks' states, for the rank that gives up waiting and for the launcher that writes the report.
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.launch.logbook import GroupState, RankState
from echelon.launch.watch import Sight


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0–2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    several = sum(map(len, runs)) > 1
    return f"rank{'s' * several} {', '.join(parts)}"


def operation_text(group: GroupState) -> str:
    """`all_reduce of float32 × 1,024 (number 12) in dimension dp, ranks 0, 2`."""
    size = f" × {group.elements:,}" if group.elements else ""
    return f"{group.operation}{size} (number {group.sequence}) in {group_text(group)}"


def group_text(group: GroupState) -> str:
    if group.dimension == "default_pg":
        return "the world"
    name = f"dimension {group.dimension.removeprefix('mesh_')}" if group.dimension.startswith("mesh_") else ""
    return f"{name or f'group {group.name!r}'} ({ranks_text(group.ranks)})"


def missing(group: GroupState, states: dict[int, RankState]) -> list[int]:
    """The members that have not come to the operation that a rank is in."""
    return [
        rank
        for rank in group.ranks
        if (there := _same(group, states.get(rank))) is None or there.sequence < group.sequence
    ]


def gone(ranks: Iterable[int], sight: Sight) -> list[int]:
    """Those of `ranks` that will never come: they died or ended."""
    return [rank for rank in ranks if rank in sight.fallen or (rank in sight.states and sight.states[rank].ending)]


def never_completes(group: GroupState, sight: Sight) -> str:
    """Why an operation that a rank waits in cannot complete, if it cannot; else nothing."""
    if absent := gone(missing(group, sight.states), sight):
        return f"{operation_text(group)} can never complete: {_fates(absent, sight)}"
    if difference := _difference(group, sight.states):
        return f"the ranks' calls do not match: {difference}"
    return ""


def never_comes(group: GroupState, me: int, sight: Sight) -> str:
    """The same for a message."""
    assert group.message is not None
    peers = [rank for rank in group.ranks if rank != me] if group.message.peer is None else [group.message.peer]
    absent = gone(peers, sight)
    if len(absent) < len(peers):
        return ""
    return f"{group.message.text} in {group_text(group)} can never complete: {_fates(absent, sight)}"


def timed_out(group: GroupState, sight: Sight) -> str:
    late = missing(group, sight.states)
    reason = f"{ranks_text(late)} had not arrived" if late else "all ranks had arrived"
    return f"{operation_text(group)} was not complete after the timeout of {group.timeout:g} s: {reason}"


def message_timed_out(group: GroupState) -> str:
    assert group.message is not None
    return f"{group.message.text} in {group_text(group)} was not complete after the timeout of {group.timeout:g} s"


def account(sight: Sight) -> str:
    """A line for each rank, or for several that do the same."""
    lines: dict[str, list[int]] = {}
    for rank, state in sight.states.items():
        lines.setdefault(_doing(rank, state, sight), []).append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in lines.items())


def exit_code(sight: Sight, code: int) -> int:
    """The job's: that of the rank that fell first, where it told; else 1, if a rank handed in why the job fails; else
    `code`, which the launcher of MPI gave.

    Some give 0 although a rank vanished in the middle: others, which waited for it, bear witness.
    """
    first = [sight.states[rank].code for rank in sight.fallen[:1] if rank in sight.states]
    waiting = any(group.under_way for state in sight.states.values() for group in state.groups)
    otherwise = 1 if sight.failure else code or int(bool(sight.fallen) and waiting)
    return next(filter(None, first), otherwise)


def post_mortem(sight: Sight, code: int) -> str:
    """The launcher's report on a job that failed."""
    if sight.failure:
        return sight.failure
    first = sight.fallen[:1]  # the launcher of MPI kills the others, which then fall as well
    headline = _fates(first, sight) if first else "the job failed"
    return f"{headline}; exit code {code}\n{account(Sight(sight.states, first))}"


def _fates(ranks: list[int], sight: Sight) -> str:
    fates: dict[str, list[int]] = {}
    for rank in ranks:
        ending = sight.states[rank].ending if rank in sight.states else ""
        fates.setdefault(ending or "died without a word (killed, or crashed)", []).append(rank)
    return "; ".join(f"{ranks_text(members)} {fate}" for fate, members in fates.items())


def _doing(rank: int, state: RankState, sight: Sight) -> str:
    last = max(state.groups, key=lambda group: group.count, default=None)
    done = f"last in {operation_text(last)}" if last is not None and last.sequence else "before any operation"
    if state.ending:
        return f"{state.ending}, {done}"
    waiting = [f"waiting in {operation_text(group)}" for group in state.groups if group.under_way]
    waiting += [f"waiting for {group.message.text} in {group_text(group)}" for group in state.groups if group.message]
    if rank in sight.fallen:
        return f"died, {done}"
    return "; ".join(waiting) or f"in no operation, {done}"


def _same(group: GroupState, state: RankState | None) -> GroupState | None:
    """What another rank has done in the same group."""
    if state is None:
        return None
    return next((there for there in state.groups if (there.name, there.ranks) == (group.name, group.ranks)), None)


def _difference(group: GroupState, states: dict[int, RankState]) -> str:
    """The earliest number in which a member is stuck and for which others called another operation."""
    members = {rank: there for rank in group.ranks if (there := _same(group, states.get(rank))) is not None}
    for number in sorted({there.sequence for there in members.values() if there.under_way}):
        calls: dict[str, list[int]] = {}
        for rank, there in members.items():
            called = there.operation if there.sequence == number else there.before.get(number, "")
            if called and (there.under_way or there.sequence > number):
                calls.setdefault(called, []).append(rank)
        if len(calls) > 1:
            each = ", ".join(f"{called} on {ranks_text(ranks)}" for called, ranks in calls.items())
            return f"number {number} in {group_text(group)} is {each}"
    return ""
