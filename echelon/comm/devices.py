"""How a group carries device tensors over a transport for host memory, one way for each device.

Collectives go through the GPU's own memory where all ranks share one GPU, which they find out together in the first
collective on the device; else straight to MPI where that is CUDA-aware, else through pinned memory: there the library,
which is the same on all ranks, decides. Messages, at whose start only two ranks meet, go one of the latter ways, and
there find out for themselves whether the two share a GPU (`transports.messages`).
"""

from __future__ import annotations

import threading

import torch

from echelon.comm.streams import Ordering
from echelon.comm.transports import Transport, of_our_own
from echelon.comm.transports.direct import DirectTransport, cuda_aware
from echelon.comm.transports.gpu_memory import outboxes
from echelon.comm.transports.shared import share_gpu
from echelon.comm.transports.staged import StagedTransport


class Devices:
    """The devices of one group."""

    def __init__(self, host: Transport) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._messages: dict[torch.device, Transport] = {}
        self._collectives: dict[torch.device, Transport] = {}

    def ordering(self, device: torch.device) -> Ordering:
        """For an operation that is called now."""
        if device.type != "cuda":
            raise ValueError(f"this group moves CPU and CUDA tensors, and this tensor is on {device}")
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(**of_our_own(device))
        return Ordering(device, self._streams[device])

    def for_messages(self, device: torch.device) -> Transport:
        with self._lock:
            if device not in self._messages:
                self._messages[device] = (
                    DirectTransport(self._host, device)
                    if self._host.name == "mpi" and cuda_aware()
                    else StagedTransport(self._host, device, outboxes.of(device))
                )
            return self._messages[device]

    def for_collectives(self, device: torch.device) -> Transport:
        """Called by all ranks of the group, each for its own device."""
        if device not in self._collectives:
            messages = self.for_messages(device)
            self._collectives[device] = share_gpu(self._host, messages, device) or messages
        return self._collectives[device]

    def close(self) -> None:
        """Let go of the others' memory when it has been read; its owners keep it until then (PyTorch counts)."""
        for stream in self._streams.values():
            stream.synchronize()
        for transport in self._collectives.values():
            transport.close()
        self._collectives.clear()
        self._messages.clear()
