"""A barrier that names who does not come. It goes through the store: an MPI call could not say.

Rank 0 waits for everybody's mark, and writes its verdict for the others to read. The words are those of Gloo, which
scripts may look for.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import DistBackendError, DistNetworkError, Store

# For rank 0, which waits for the others as long as they wait for it, to say what it saw.
_VERDICT_GRACE = timedelta(seconds=5)


def pass_barrier(store: Store, number: int, rank: int, size: int, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Pass the group's barrier with that number, or raise a DistBackendError that says who did not come."""
    place = f"monitored_barrier/{number}/"
    store.set(f"{place}{rank}", "")
    if rank == 0:
        verdict = _collect(store, place, size, timeout, wait_all_ranks)
        store.set(f"{place}verdict", verdict)
    elif _appears(store, f"{place}0", timeout) and _appears(store, f"{place}verdict", timeout + _VERDICT_GRACE):
        verdict = store.get(f"{place}verdict").decode()
        if verdict:
            verdict = (
                f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0: {verdict}"
            )
    else:
        verdict = f"[Rank {rank}]: Rank 0 failed to pass monitoredBarrier in {_milliseconds(timeout)} ms"
    if verdict:
        raise DistBackendError(verdict)


def _collect(store: Store, place: str, size: int, timeout: timedelta, wait_all_ranks: bool) -> str:
    """Rank 0's part: who did not come, in words, or nothing."""
    deadline = time.monotonic() + timeout.total_seconds()
    missing = []
    for rank in range(1, size):
        remaining = deadline - time.monotonic()
        if remaining <= 0 and not wait_all_ranks:
            return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {_milliseconds(timeout)} ms"
        if not _appears(store, f"{place}{rank}", timedelta(seconds=max(remaining, 0.001))):
            missing.append(rank)
            if not wait_all_ranks:
                break
    if not missing:
        return ""
    who = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"[Rank 0]: {who} failed to pass monitoredBarrier in {_milliseconds(timeout)} ms"


def _appears(store: Store, key: str, timeout: timedelta) -> bool:
    """Whether somebody writes `key` to the store in time."""
    try:
        store.wait([key], timeout)
    except DistNetworkError:
        raise
    except RuntimeError:  # DistStoreError, if it is not a FileStore
        return False
    return True


def _milliseconds(timeout: timedelta) -> int:
    return round(timeout.total_seconds() * 1000)
