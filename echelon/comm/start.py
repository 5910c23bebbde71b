"""How a group comes to be: over MPI where there is an MPI world, over PyTorch's own Gloo where there is none.

Loaded when the first group is made, never by `import torch`.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial
from typing import Any, NoReturn

from torch.distributed import Store, TCPStore

from echelon.comm.group import EchelonGroup
from echelon.comm.groups import close_groups, finish_groups, waited_messages
from echelon.comm.meeting import meet
from echelon.comm.recorder import record_if_asked
from echelon.comm.roads import Roads
from echelon.comm.routes import Router, Table
from echelon.comm.tables import AUTO, agreed, asked, warn_of_elsewhere
from echelon.comm.transports import HostTransport, Transport
from echelon.comm.transports.native import gloo, nccl
from echelon.comm.watchdog import Watchdog
from echelon.comm.world import before_finalizing, leave, mpi_world, on_end
from echelon.launch.identity import identity

_watchdogs: list[Watchdog] = []  # one, as soon as there is a group
_auto: list[Table] = []  # what `auto` is, as soon as this rank has learnt it


def create_group(options: Any) -> EchelonGroup:
    """Make the group that `options` (PyTorch's `_DistributedBackendOptions`) describe; called by its members alone."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    table = asked()
    arguments = (options.store, options.group_rank, options.group_size, options.timeout)
    others: dict[str, Callable[[], Transport]] = {"nccl": partial(nccl, *arguments)}
    explained = {}
    base: HostTransport
    if identity().in_mpi_world:
        base, others["gloo"] = _mpi(options, ranks), partial(gloo, *arguments)
        explained = {"explain_timeout": _watchdogs[0].explain_timeout}
    else:
        _say_once()
        _close_in_time()
        base = gloo(*arguments)
    place, nodes = meet(base, ranks, AUTO if table is None else table.digest)
    if table is None:
        table = agreed(base, place, _auto)
    warn_of_elsewhere(table)
    roads, router = Roads(base, others, nodes), Router(table, place)
    for transport in router.carriers_of_messages:
        roads.open_messages(transport)
    return EchelonGroup(options.group_id, ranks, roads, router, options.store, options.timeout, **explained)


def refuse(text: str, code: int) -> NoReturn:
    """End this rank, and with it the job, for a reason that is the user's to mend; it is said once."""
    if _watchdogs:
        _watchdogs[0].refuse(text, code)
    print(f"echelon: {text}", file=sys.stderr, flush=True)
    sys.exit(code)


def rendezvous(given: dict[str, int], timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    """Agree on a store through MPI, so that nobody need set MASTER_ADDR.

    `given` are the script's own rank and world_size, if any.
    """
    world = mpi_world()
    rank, size = world.Get_rank(), world.Get_size()
    # Scripts for PyTorch's own MPI backend pass 0 and 0, or -1, and let MPI decide.
    if given.get("world_size", 0) > 0 and (given["world_size"], given.get("rank", rank)) != (size, rank):
        raise ValueError(
            f"init_process_group was given {given}, but in the MPI world this process is rank {rank} of {size}: "
            "leave both out"
        )
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    one_node = node.Get_size() == size
    node.Free()
    if rank == 0:
        host = "127.0.0.1" if one_node else socket.gethostname()
        listener = socket.create_server(("127.0.0.1" if one_node else "", 0))
        port = listener.getsockname()[1]
        served: dict[str, Any] = {
            "wait_for_workers": False,
            "multi_tenant": True,
            "master_listen_fd": listener.detach(),
        }
        store = TCPStore(host, port, size, True, timeout, **served)
        world.bcast((host, port))
    else:
        host, port = world.bcast(None)
        store = TCPStore(host, port, size, False, timeout)
    yield store, rank, size


def _mpi(options: Any, ranks: list[int]) -> HostTransport:
    from echelon.comm.transports.mpi import MPITransport

    world = mpi_world()
    if options.group_size > world.Get_size() or ranks[options.group_rank] != world.Get_rank():
        raise RuntimeError(
            f"this process is rank {ranks[options.group_rank]} of {options.group_size} for PyTorch, "
            f"but rank {world.Get_rank()} of {world.Get_size()} for MPI: "
            "RANK and WORLD_SIZE (or rank= and world_size=) must be MPI's own; leave them out"
        )
    _look_after(options.store)
    members = world.Get_group().Incl(ranks)
    # The tag keeps apart groups that different threads make at once; every MPI allows tags up to 32767.
    return MPITransport(world.Create_group(members, zlib.crc32(options.group_id.encode()) % 32768))


def _look_after(store: Store) -> None:
    """With the first group: the watchdog begins; what was started and never waited for is finished before MPI ends."""
    if not _watchdogs:
        end_record = record_if_asked(identity())

        def give_up(status: int) -> NoReturn:
            end_record()
            leave(status)

        watchdog = Watchdog(store, waited_messages, give_up)
        _watchdogs.append(watchdog)
        before_finalizing(finish_groups)
        on_end(watchdog.end)
        on_end(lambda _how, _code: end_record())


@cache
def _close_in_time() -> None:
    atexit.register(record_if_asked(identity()))
    atexit.register(close_groups)


@cache
def _say_once() -> None:
    if os.environ.get("RANK", "0") == "0":
        torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        started = "torchrun started this job" if torchrun else "no MPI launcher started this process"
        print(
            f"echelon: {started}, so there is no MPI world: communicating over Gloo (NCCL for CUDA tensors). "
            "For MPI, start with `echelon run -n N script.py`",
            file=sys.stderr,
        )
