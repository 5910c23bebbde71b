"""The order in which the ranks of each schedule compute: pure functions of ranks, microbatches and chunks.

Most are one pattern: some forwards to warm up, then a forward and a backward in turn, then the backwards that are
left. They differ in how many warm up, in the stages of a rank, and in when weights change.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.parallel.pipeline.actions import Action, Direction, Kind, Schedule
from echelon.parallel.pipeline.messages import with_messages

_BOTH: tuple[Direction, ...] = ("down", "up")


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019)."""
    rows = [_row(rank, microbatches, warm=microbatches) for rank in range(ranks)]
    return _synchronous("gpipe", rows, microbatches)


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """A backward as soon as there is one, so no more microbatches under way than ranks (DAPPLE; Fan et al., 2021)."""
    rows = [_row(rank, microbatches, warm=ranks - 1 - rank) for rank in range(ranks)]
    return _synchronous("1f1b", rows, microbatches)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1f1b with several smaller stages a rank: `ranks` microbatches through each in turn (Narayanan et al., 2021)."""
    turns = [
        (chunk, microbatch)
        for first in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for microbatch in range(first, first + ranks)
    ]
    rows = []
    for rank in range(ranks):
        forwards = [Action("forward", rank + chunk * ranks, microbatch) for chunk, microbatch in turns]
        backwards = [Action("backward", rank + (chunks - 1 - chunk) * ranks, microbatch) for chunk, microbatch in turns]
        rows.append(_in_turn(forwards, backwards, warm=2 * (ranks - 1 - rank) + (chunks - 1) * ranks))
    return _synchronous("interleaved", rows, microbatches, chunks=chunks)


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """1f1b whose backwards are split: the part for weights, which nobody waits for, fills bubbles (ZB-H1; Qi, 2023).

    Rank r puts that part off by r microbatches, so that all ranks have as many under way as the first. When no forward
    is left, it goes between the backwards for inputs.
    """
    rows = []
    for rank in range(ranks):
        row: list[Action] = []
        behind: list[Action] = []
        warm = min(ranks - 1 - rank, microbatches)
        for action in _row(rank, microbatches, warm, backward="backward_input"):
            row.append(action)
            if action.kind == "backward_input":
                behind.append(Action("backward_weight", rank, action.microbatch))
                if len(behind) > rank or action.microbatch >= microbatches - warm:
                    row.append(behind.pop(0))
        rows.append(row + behind)
    return _synchronous("zero-bubble", rows, microbatches)


def gems(ranks: int, microbatches: int) -> Schedule:
    """Two pipelines in opposite directions: each forward follows the last microbatch's backward (Jain et al., 2020)."""
    rows = [_row_of_both(rank, ranks, microbatches) for rank in range(ranks)]
    return _synchronous("gems", rows, microbatches, directions=_BOTH)


def gems_gpipe(ranks: int, microbatches: int) -> Schedule:
    """As gems, with all microbatches of a direction under way at once, as in gpipe: first all down, then all up."""
    rows = []
    for rank in range(ranks):
        row: list[Action] = []
        for way, numbers in zip(_BOTH, (range(0, microbatches, 2), range(1, microbatches, 2)), strict=True):
            stage = rank if way == "down" else ranks - 1 - rank
            row += [Action("forward", stage, each, way) for each in numbers]
            row += [Action("backward", stage, each, way) for each in numbers]
        rows.append(row)
    return _synchronous("gems-gpipe", rows, microbatches, directions=_BOTH)


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Two pipelines in opposite directions, each in the other's bubbles (Li and Hoefler, 2021).

    Time is slots of one forward or one backward. A rank's forwards down and backwards up fall into slots of one
    parity, its forwards up and backwards down into the others: so no two meet. A unit is `ranks` microbatches in twice
    as many slots; the next unit's forwards begin where the last backwards of this one leave slots.
    """

    def slot(action: Action) -> int:
        unit, inside = divmod(action.microbatch // 2, ranks // 2)
        start = 2 * ranks * unit + 2 * inside
        return start + (action.stage if action.kind == "forward" else 2 * ranks - 1 - action.stage)

    rows = [sorted(_row_of_both(rank, ranks, microbatches), key=slot) for rank in range(ranks)]
    return _synchronous("chimera", rows, microbatches, directions=_BOTH)


def pipedream(ranks: int, microbatches: int) -> Schedule:
    """1f1b with an update after every backward, which finds the weights of its forward (Narayanan et al., 2019)."""
    rows = []
    for rank in range(ranks):
        warm = ranks - 1 - rank
        versions = [max(microbatch - warm, 0) for microbatch in range(microbatches)]
        rows.append(_updated(_row(rank, microbatches, warm, versions), every=1))
    return with_messages("pipedream", rows, microbatches, is_versioned=True)


def pipedream_2bw(ranks: int, microbatches: int) -> Schedule:
    """1f1b with an update after every `ranks` microbatches, with weights one update old (Narayanan et al., 2021)."""
    versions = [max(microbatch // ranks - 1, 0) for microbatch in range(microbatches)]
    rows = [_updated(_row(rank, microbatches, ranks - 1 - rank, versions), every=ranks) for rank in range(ranks)]
    return with_messages("pipedream-2bw", rows, microbatches, is_versioned=True)


def _row(
    stage: int, microbatches: int, warm: int, versions: Sequence[int] | None = None, backward: Kind = "backward"
) -> list[Action]:
    """A rank with one stage."""
    used = enumerate(versions or [0] * microbatches)
    both = [(Action("forward", stage, m, version=v), Action(backward, stage, m, version=v)) for m, v in used]
    return _in_turn([forward for forward, _ in both], [back for _, back in both], warm)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm: int) -> list[Action]:
    """So many forwards to warm up, then a forward and a backward in turn, then the backwards that are left."""
    warm = min(warm, len(forwards))
    pairs = zip(forwards[warm:], backwards, strict=False)
    return [*forwards[:warm], *(action for pair in pairs for action in pair), *backwards[len(forwards) - warm :]]


def _row_of_both(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """A rank of two pipelines, with one microbatch after the other."""
    row: list[Action] = []
    for microbatch in range(microbatches):
        way = _BOTH[microbatch % 2]
        stage = rank if way == "down" else ranks - 1 - rank
        row += [Action("forward", stage, microbatch, way), Action("backward", stage, microbatch, way)]
    return row


def _updated(row: Sequence[Action], every: int) -> list[Action]:
    """With an update after each so many backwards."""
    updated: list[Action] = []
    for action in row:
        updated.append(action)
        done = action.microbatch + 1
        if action.kind == "backward" and done % every == 0:
            updated += _update(action.microbatch, done // every)
    return updated


def _synchronous(
    name: str,
    rows: Sequence[Sequence[Action]],
    microbatches: int,
    *,
    chunks: int = 1,
    directions: tuple[Direction, ...] = ("down",),
) -> Schedule:
    """With one update at the end."""
    ended = [[*row, *_update(microbatches - 1, 1)] for row in rows]
    return with_messages(name, ended, microbatches, chunks=chunks, directions=directions)


def _update(microbatch: int, version: int) -> list[Action]:
    return [Action("reduce", microbatch=microbatch), Action("step", microbatch=microbatch, version=version)]
