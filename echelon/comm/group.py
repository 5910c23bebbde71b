"""Echelon's process group: what `torch.distributed` calls, whoever the caller is (a script, DDP's reducer, FSDP2,
DTensor, …).

Every method has the same three beats: read PyTorch's options, name the operation, submit it to the group's lane. A
synchronous call returns None when it is done (so PyTorch makes no `Work`); an asynchronous one returns a `Work` at
once. Some operations have an older and a newer name: torch 2.11 calls the one, 2.13 the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ProcessGroup, ReduceOp, Store, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from echelon.comm import operations
from echelon.comm.arguments import (
    check_list,
    check_multiple,
    check_splits,
    common_dtype,
    listed,
    listed_lists,
    read_options,
)
from echelon.comm.check import CHECKING, compare
from echelon.comm.groups import groups, post_office
from echelon.comm.lane import Lane
from echelon.comm.meeting import differences
from echelon.comm.monitored_barrier import pass_barrier
from echelon.comm.profile import begin, profiling
from echelon.comm.recorder import Tap, dimension_of, recorder
from echelon.comm.records import Record, now
from echelon.comm.reduction import LOW_PRECISION, plain_operations, resolve
from echelon.comm.roads import Roads
from echelon.comm.routes import Place, Road, Router, opens_beforehand
from echelon.comm.streams import Ordering
from echelon.comm.torch_compat import announce, watched_by_modes
from echelon.comm.transports import Transport, copy_memory, show
from echelon.comm.watchdog import logbook
from echelon.comm.work import CollectiveWork, MessageWork
from echelon.launch.logbook import SEQUENCE

BACKEND = "echelon"
_MESSAGES = {"send": "a message to", "receive": "a message from"}  # for those who report on them
# In a forked child: never dropped, since Gloo would wait for threads that it has not.
_abandoned: list[Roads] = []


class EchelonGroup(ProcessGroup):
    """A `torch.distributed.ProcessGroup`, each of whose operations takes the road that its router tells."""

    def __init__(
        self,
        name: str,
        ranks: list[int],
        roads: Roads,
        router: Router,
        store: Store,
        timeout: timedelta,
        explain_timeout: Callable[[int], str] = lambda _row: "a rank has not come to the barrier in time",
    ) -> None:
        """`ranks` are the members' in the world; `explain_timeout` tells more, by the group's row in the logbook."""
        super().__init__(roads.base.rank, roads.base.size)  # type: ignore[call-arg]
        self._ranks = tuple(ranks)
        self._logbook = logbook()
        self._row = self._logbook.open_row(name, ranks, timeout.total_seconds())
        self._roads, self._router = roads, router
        self._explain_timeout = explain_timeout
        self._is_open = True
        self._store = store
        self._timeout = timeout
        self._name, self._description = name, ""
        self._barriers = 0
        self._lane = Lane(roads.base.name, self._logbook, self._row)
        self._plain = {} if CHECKING else plain_operations(roads.base.reducible)
        groups.add(self)

    @property
    def transport(self) -> str:
        """The name of what every group has: `mpi` or, without an MPI world, `gloo`."""
        return self._roads.base.name

    @property
    def place(self) -> Place:
        """How many ranks and nodes it has, and what they can reach each other by."""
        return self._router.place

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each of its ranks, numbered from 0."""
        return self._roads.nodes

    def road(self, operation: str, size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Road:
        """The road that an operation (by its name in a table) of so many bytes takes now."""
        return self._router.on(device).road(operation, size, dtype in LOW_PRECISION)

    @property
    def chosen_roads(self) -> Mapping[str, Road]:
        """The roads that were chosen for this group, and hold before those of the table."""
        return self._router.chosen

    def restore_roads(self, roads: Mapping[str, Road]) -> None:
        """What held before, on which all ranks have agreed before: none is waited for, not even after an error."""
        self._router.choose(roads)

    def choose_roads(self, roads: Mapping[str, Road]) -> Mapping[str, Road]:
        """From now on these operations take these roads, and all others those of the table; returns what was chosen
        before. Called by all ranks of the group, which make sure of it.
        """
        before = self.chosen_roads
        words = ", ".join(f"{operation}={road}" for operation, road in sorted(roads.items())) or "nothing"
        self._lane.check_open()
        self._lane.call((self._logbook.code("route", None), 0), self._agree, words, roads.get("message"))
        self._router.choose(roads)
        return before

    def all_reduce_at_once(self, tensor: Tensor, op: Any) -> bool:
        """The most frequent case in few steps, since its microseconds are counted; False if this is not that case."""
        operation = self._plain.get((id(op), tensor.dtype))
        if operation is None or not tensor.is_cpu or tensor.is_sparse or not tensor.is_contiguous():
            return False
        transport = self._roads.opened(self._router.on_cpu.road("all_reduce", tensor.nbytes))
        return (
            transport is not None
            and tensor.dtype in transport.reducible
            and not profiling()
            and not recorder.logs
            and self._lane.try_call(
                (self._logbook.code("all_reduce", tensor.dtype), tensor.numel()),
                transport.all_reduce,
                tensor,
                operation,
            )
        )

    def allreduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> Work | None:
        tensors, opts = listed(tensors), read_options(AllreduceOptions, opts, reduceOp=op)
        reduction = resolve(opts.reduceOp, common_dtype(tensors))
        if len(tensors) != 1:
            return self._submit(opts, tensors, operations.all_reduce_coalesced, tensors, reduction)
        return self._submit(opts, tensors, operations.all_reduce, tensors[0], reduction)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work | None:
        opts = read_options(AllreduceCoalescedOptions, opts)
        reduction = resolve(opts.reduceOp, common_dtype(tensors))
        return self._submit(opts, tensors, operations.all_reduce_coalesced, tensors, reduction)

    def reduce(
        self, tensors: Any, opts: Any = None, root: int = 0, op: Any = None, timeout: timedelta | None = None
    ) -> Work | None:
        if isinstance(root, (ReduceOp, ReduceOp.RedOpType)):  # reduce(tensor, root, op), by position
            opts, root, op = None, opts, root
        opts = read_options(ReduceOptions, opts, rootRank=root, reduceOp=op)
        [tensor] = listed(tensors)
        return self._submit(
            opts, [tensor], operations.reduce, tensor, opts.rootRank, resolve(opts.reduceOp, tensor.dtype)
        )

    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None) -> Work | None:
        opts = read_options(BroadcastOptions, opts, rootRank=root)
        [tensor] = listed(tensors)
        return self._submit(opts, [tensor], operations.broadcast, tensor, opts.rootRank)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work | None:
        opts = read_options(AllgatherOptions, opts)
        outputs, [tensor] = listed_lists(output_tensors)[0], listed(input_tensors)
        check_list("output", outputs, self.size())
        return self._submit(opts, outputs, operations.all_gather, outputs, tensor)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work | None:
        check_multiple("output", output, input, self.size())
        return self._submit(read_options(AllgatherOptions, opts), [output], operations.all_gather_single, output, input)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> Work | None:
        """`output_lists[rank][i]` receives tensor `i` of that rank."""
        by_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self._each(
            read_options(AllgatherOptions, opts), output_lists, operations.all_gather, by_tensor, input_list
        )

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work | None:
        for output, input in zip(outputs, inputs, strict=True):
            check_multiple("output", output, input, self.size())
        return self._each(read_options(AllgatherOptions, opts), outputs, operations.all_gather_single, outputs, inputs)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None
    ) -> Work | None:
        opts = read_options(GatherOptions, opts, rootRank=root)
        [tensor] = listed(input_tensors)
        outputs = listed_lists(output_tensors)[0] if output_tensors else None
        if opts.rootRank == self.rank():
            check_list("output", outputs or [], self.size())
        return self._submit(opts, outputs or [], operations.gather, outputs, tensor, opts.rootRank)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None
    ) -> Work | None:
        opts = read_options(ScatterOptions, opts, rootRank=root)
        [tensor] = listed(output_tensors)
        inputs = listed_lists(input_tensors)[0] if input_tensors else None
        if opts.rootRank == self.rank():
            check_list("input", inputs or [], self.size())
        return self._submit(opts, [tensor], operations.scatter, tensor, inputs, opts.rootRank)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
    ) -> Work | None:
        opts = read_options(ReduceScatterOptions, opts, reduceOp=op)
        [output], inputs = listed(output_tensors), listed_lists(input_tensors)[0]
        check_list("input", inputs, self.size())
        reduction = resolve(opts.reduceOp, output.dtype)
        return self._submit(opts, [output], operations.reduce_scatter, output, inputs, reduction)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work | None:
        opts = read_options(ReduceScatterOptions, opts)
        check_multiple("input", input, output, self.size())
        reduction = resolve(opts.reduceOp, output.dtype)
        return self._submit(opts, [output], operations.reduce_scatter_single, output, input, reduction)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work | None:
        opts = read_options(ReduceScatterOptions, opts)
        for output, input in zip(outputs, inputs, strict=True):
            check_multiple("input", input, output, self.size())
        reductions = [resolve(opts.reduceOp, output.dtype) for output in outputs]
        return self._each(opts, outputs, operations.reduce_scatter_single, outputs, inputs, reductions)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work | None:
        for name, tensor, splits in (("output", output, output_split_sizes), ("input", input, input_split_sizes)):
            check_splits(name, tensor, splits, self.size())
        arguments = (output, input, output_split_sizes, input_split_sizes)
        return self._submit(read_options(AllToAllOptions, opts), [output], operations.all_to_all_single, *arguments)

    def alltoall(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work | None:
        check_list("output", output_tensors, self.size())
        check_list("input", input_tensors, self.size())
        return self._submit(
            read_options(AllToAllOptions, opts), output_tensors, operations.all_to_all, output_tensors, input_tensors
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work | None:
        opts = read_options(BarrierOptions, opts, timeout=timeout)
        timeout = opts.timeout if opts.timeout > timedelta(0) else self._timeout
        return self._submit(opts, [], operations.barrier, timeout)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        [tensor] = listed(tensors)
        return self._message("send", tensor, dst, tag, tensor.detach().contiguous())

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._receive(tensors, None, tag)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """A barrier that names who does not come. It goes through the store: an MPI call could not be given up."""
        self._barriers += 1
        pass_barrier(self._store, self._barriers, self.rank(), self.size(), timeout, wait_all_ranks)

    def finish(self) -> None:
        """Finish what is under way; nothing can be started any more."""
        self._lane.close(f"process group {self._name!r} was destroyed: no operation can be started on it any more")
        self._plain = {}
        self._roads.finish()

    def shutdown(self) -> None:
        """Finish, and free the communicators; all ranks of the group do this."""
        if self._is_open:
            self._is_open = False
            self.finish()
            self._logbook.close_row(self._row)
            self._roads.close()

    def abort(self) -> None:
        self.shutdown()

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description
        self._logbook.describe_row(self._row, dimension=description)

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName, setGroupName)
    group_desc = property(getGroupDesc, setGroupDesc)

    def get_group_store(self) -> Store:
        return self._store

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> EchelonGroup:
        """A group of PyTorch's own asks one backend a device; this one stands for all of them."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._logbook.describe_row(self._row, timeout=timeout.total_seconds())

    def abandon(self) -> None:
        """Refuse all further use: this process is a fork of the rank that owns the group."""
        self._lane.abandon("this process was forked from a rank and cannot communicate: only the rank itself can")
        _abandoned.append(self._roads)
        self._is_open, self._plain = False, {}

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _submit(self, opts: Any, outputs: list[Any], operation: Callable[..., None], *arguments: Any) -> Work | None:
        self._lane.check_open()
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            # Fake tensors have shapes and no memory: as over PyTorch's own backends, nothing is communicated.
            return CollectiveWork.done(outputs) if opts.asyncOp else None
        call = operations.Call(operation, arguments)
        device = next((tensor.device for tensor in call.tensors if not tensor.is_cpu), None)
        road = self._road(call, device)
        if watched_by_modes():
            announce(call.name, several=operation is operations.one_after_another)
        tap = Tap(self._record(call.name, call.dtype, call.payload(self.size()))) if recorder.logs else None
        note = self._logbook.code(call.name, call.dtype), call.elements
        end = begin(call.name, call.inputs) if profiling() else None
        record = None if tap is None else tap.record
        if road.transport == "nccl" and self._lane.try_call(note, self._carry_out, call, road, device, None, tap, end):
            return CollectiveWork.done(outputs) if opts.asyncOp else None  # it is on the stream: nothing to wait for
        ordering = None if device is None else self._roads.ordering(device)
        carry_out = self._carry_out, call, road, device, ordering, tap, end
        if opts.asyncOp:
            return self._lane.post(outputs, note, *carry_out, ordering=ordering, record=record)
        self._lane.call(note, *carry_out)
        if ordering is not None:
            ordering.join()
        if record is not None:
            record.blocked = now() - record.enqueued
        return None

    def _road(self, call: operations.Call, device: torch.device | None) -> Road:
        if call.tensors and call.tensors[0].is_sparse:  # whose sizes differ from rank to rank
            return Road(self._roads.base.name)
        routes = self._router.on("cpu" if device is None else device.type)
        return routes.road(call.routed, call.payload(self.size()), call.dtype in LOW_PRECISION)

    def _agree(self, words: str, messages: Road | None) -> None:
        """That all ranks have chosen the same; in the lane."""
        if choices := differences(show(self._roads.base, words), self._ranks):
            raise DistBackendError(f"all ranks of a group must choose the same roads, but they chose: {choices}")
        if messages is not None and opens_beforehand(messages, "cpu", self.place):
            self._roads.open_messages(messages.transport)

    def _carry_out(
        self,
        call: operations.Call,
        road: Road,
        device: torch.device | None,
        ordering: Ordering | None,
        tap: Tap | None = None,
        end: Callable[[], object] | None = None,
    ) -> None:
        """What the lane runs; `end` is called in any case."""
        try:
            if CHECKING:
                compare(self._roads.base, call, road, self._ranks)
            transport = self._roads.open(road, device)
            if ordering is None:
                self._do(call, transport, tap)
            else:
                ordering.run(call.tensors, self._do, call, transport, tap)
        except TimeoutError:
            raise DistBackendError(self._explain_timeout(self._row)) from None
        finally:
            if end is not None:
                end()

    def _do(self, call: operations.Call, transport: Transport, tap: Tap | None) -> None:
        if tap is None:
            call.operation(transport, *call.arguments)
            return
        try:
            number = self._logbook.rows[self._row + SEQUENCE]
            call.operation(tap.open(transport, number), *call.arguments)
        finally:
            tap.close()

    def _record(self, operation: str, dtype: torch.dtype | None, payload: int, peer: int | None = None) -> Record:
        """The beginning of one, handed to those who record."""
        names = self._name, dimension_of(self._name, self._description), self._ranks
        record = Record(operation, *names, str(dtype or "").removeprefix("torch."), payload, now(), peer=peer)
        recorder.add(record)
        return record

    def _each(self, opts: Any, outputs: list[Any], operation: Callable[..., None], *lists: list[Any]) -> Work | None:
        return self._submit(opts, outputs, operations.one_after_another, operation, *lists)

    def _receive(self, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        [tensor] = listed(tensors)
        if tensor.is_contiguous():
            return self._message("receive", tensor, src, tag, tensor)
        dense = tensor.detach().contiguous()
        return self._message("receive", tensor, src, tag, dense, partial(copy_memory, tensor, dense))

    def _message(
        self,
        method: str,
        tensor: Tensor,
        peer: int | None,
        tag: int,
        memory: Tensor,
        arrived: Callable[[], object] | None = None,
    ) -> Work:
        """Start a message from or into `memory`, which holds what `tensor` does or will."""
        self._lane.check_open()
        there = None if peer is None else self._ranks[peer]
        if profiling():
            name = "send" if method == "send" else "recvAnySource" if peer is None else "recv"
            arrived = partial(_in_turn, arrived, begin(name, [tensor]))
        record = ordering = None
        if recorder.logs:  # counted once, by its sender
            payload = memory.nbytes if method == "send" else 0
            record = self._record(method, tensor.dtype, payload, -1 if there is None else there)
            record.wire = 0 if peer == self.rank() else payload
        device = None if tensor.is_cpu else tensor.device
        road = self._router.on(tensor.device.type).road("message", 0)
        transport = self._roads.for_messages(road.transport, device)
        if device is None or road.transport == "nccl":
            request = getattr(transport, method)(memory, peer, tag)
        else:
            ordering = self._roads.ordering(device)
            request = ordering.run([memory], getattr(transport, method), memory, peer, tag)
        if record is not None:
            record.transport, record.algorithm, record.started = transport.name, "library", now()
        label = _MESSAGES[method], self._row, there, tag
        work = MessageWork([tensor], label, request, (memory, self), arrived, ordering, record)
        post_office.watch(work)
        return work


def _in_turn(*functions: Callable[[], object] | None) -> None:
    for function in functions:
        if function is not None:
            function()
