"""The roads of one group: opened when an operation first takes one, and closed with the group.

Every group has one transport from the start, over which its ranks have met; Gloo and NCCL find their peers through the
group's store. A road is opened inside the lane, as a part of the operation that first needs it: all ranks get there in
the same order, so they open together. (Messages have no order between all ranks: what carries them is opened before.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor

from echelon.comm import algorithms, ring
from echelon.comm.devices import Devices
from echelon.comm.levels import Levels
from echelon.comm.overlay import Overlay
from echelon.comm.routes import Road
from echelon.comm.streams import Ordering
from echelon.comm.transports import HostTransport, Transport
from echelon.comm.transports.gpu_memory import outboxes
from echelon.comm.transports.native import NativeTransport
from echelon.comm.transports.staged import StagedTransport

_ANYWHERE = ("exchange", "ring")  # algorithms that work on tensors of any device


class Roads:
    """`base` is the transport that the group has; `others` make further ones, by name."""

    def __init__(self, base: HostTransport, others: dict[str, Callable[[], Transport]], nodes: Sequence[int]) -> None:
        """`nodes[rank]` tells on which node each rank of the group is."""
        self.base = base
        self.nodes = tuple(nodes)
        self._make = others
        self._transports: dict[str, Transport] = {base.name: base}
        self._inner: dict[str, Transport] = {}  # by transport, between the ranks of this rank's node
        self._levels: dict[str, Levels] = {}
        self._devices: dict[str, Devices] = {}
        self._lock = threading.Lock()
        self._open: dict[tuple[Road, torch.device | None], Transport] = {}

    def open(self, road: Road, device: torch.device | None = None) -> Transport:
        """The road, for tensors on `device` (none: the CPU). Called by all ranks of the group, in one order."""
        found = self._open.get((road, device))
        if found is None:
            found = self._open[road, device] = self._made(road, device)
        return found

    def opened(self, road: Road) -> Transport | None:
        """A road for CPU tensors, if an operation has taken it before."""
        return self._open.get((road, None))

    def open_messages(self, transport: str) -> None:
        """Called by all ranks of the group."""
        found = self._transport(transport)
        if isinstance(found, NativeTransport):
            found.open_messages()

    def for_messages(self, transport: str, device: torch.device | None) -> Transport:
        """What carries messages."""
        if transport == "nccl":
            nccl = self._transport(transport)
            with self._lock:
                cast(NativeTransport, nccl).open_messages()
            return nccl
        return self._transport(transport) if device is None else self._devices_of(transport).for_messages(device)

    def ordering(self, device: torch.device) -> Ordering:
        """For an operation on a device that is called now."""
        return self._devices_of(self.base.name).ordering(device)

    def finish(self) -> None:
        """Let go of what others do not wait for: Gloo's threads abort a process whose Python ends before them."""
        for devices in self._devices.values():
            devices.close()
        self._devices.clear()
        for transport in (*self._transports.values(), *self._inner.values()):
            if isinstance(transport, NativeTransport):
                transport.close()

    def close(self) -> None:
        """Free the communicators; all ranks of the group do this."""
        self.finish()
        self._open.clear()
        self._levels.clear()
        for transport in (*self._inner.values(), self.base):
            transport.close()

    def _made(self, road: Road, device: torch.device | None) -> Transport:
        below: Transport
        if device is None or road.transport == "nccl":
            below = self._transport(road.transport)
        elif road.algorithm in ("", *_ANYWHERE):
            below = self._devices_of(road.transport).for_collectives(device)
        else:
            return StagedTransport(self.open(road), device, outboxes.of(device))
        if road.algorithm == "exchange":
            return Overlay(below, road.algorithm, _EXCHANGE)
        if road.algorithm == "ring":
            return Overlay(below, road.algorithm, _RING)
        if road.algorithm:
            levels = self._levels_over(road.transport)
            return Overlay(below, road.algorithm, levels.ways, halves=True, written=levels.written)
        return below

    def _levels_over(self, transport: str) -> Levels:
        """One for a transport: with it comes a window."""
        if transport not in self._levels:
            host = cast(HostTransport, self._transport(transport))
            here = [rank for rank, node in enumerate(self.nodes) if node == self.nodes[host.rank]]
            if len(here) < host.size and transport not in self._inner:
                self._inner[transport] = host.part(here)
            self._levels[transport] = Levels(host, self._inner.get(transport, host), self.nodes)
        return self._levels[transport]

    def _transport(self, name: str) -> Transport:
        found = self._transports.get(name)
        if found is not None:
            return found
        with self._lock if name == "nccl" else nullcontext():  # messages come to it from any thread
            if name not in self._transports:
                self._transports[name] = self._make[name]()
        return self._transports[name]

    def _devices_of(self, transport: str) -> Devices:
        host = self._transport(transport)
        with self._lock:
            if transport not in self._devices:
                self._devices[transport] = Devices(host)
            return self._devices[transport]


def _all_reduce(host: Transport, tensor: Tensor, operation: str) -> None:
    algorithms.all_reduce(host, tensor.view(-1), operation)


def _reduce(host: Transport, tensor: Tensor, operation: str, root: int) -> None:
    algorithms.reduce(host, tensor.view(-1), operation, root)


def _reduce_scatter(host: Transport, output: Tensor, input: Tensor, operation: str) -> None:
    algorithms.reduce_scatter(host, output.view(-1), list(input.view(host.size, -1)), operation)


_Ways = dict[str, Callable[..., None]]
_EXCHANGE: _Ways = {"all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter}
_RING: _Ways = {
    "all_reduce": ring.all_reduce,
    "reduce_scatter": ring.reduce_scatter,
    "all_gather": ring.all_gather,
    "all_to_all": ring.all_to_all,
}
