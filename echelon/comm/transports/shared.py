"""Ranks that share one GPU, which NCCL refuses: each has a mailbox in the GPU's memory that all of them can read.

An operation is a series of turns: everyone writes into its own mailbox, all meet at a barrier on the host, everyone
reads what it needs from the others'. A mailbox has two halves, used in turn: a half is written again only two turns
later, when the barrier between has shown that its readers are done. Nothing leaves the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from echelon.comm import algorithms
from echelon.comm.transports import Parcel, Request, Transport, copy_to_self, exchange_rows, gpu_memory, parts, show
from echelon.comm.transports.gpu_memory import HALF

_STAGED = 2**18  # bytes below which the turn's barrier costs more than the way over the host (benchmarks/h200/comm.py)


class SharedTransport:
    """`mailboxes[rank]` is that rank's memory, of two halves; messages and what is small go over `by_host`."""

    def __init__(self, host: Transport, by_host: Transport, mailboxes: list[Tensor]) -> None:
        self.name = f"{host.name}, shared GPU"
        self.rank, self.size, self.reducible = host.rank, host.size, host.reducible
        self.highest_tag = host.highest_tag
        self.algorithm = ""
        self._host = host
        self._by_host = by_host
        self._mailboxes = mailboxes
        self._turns = 0
        self._device = torch.get_device_module(mailboxes[0].device)
        self._written = self._device.Event()

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        if tensor.nbytes < _STAGED:
            self._by_host.all_reduce(tensor, operation)
            return
        for chunk in self._chunks(tensor):
            boxes = self._turn([chunk])
            algorithms.accumulate([_as(box, chunk) for box in boxes], operation, chunk)

    def reduce(self, tensor: Tensor, operation: str, root: int) -> None:
        for chunk in self._chunks(tensor):
            boxes = self._turn([chunk])
            if self.rank == root:
                algorithms.accumulate([_as(box, chunk) for box in boxes], operation, chunk)

    def reduce_scatter(self, output: Tensor, input: Tensor, operation: str) -> None:
        rows, flat = input.view(self.size, -1), output.view(-1)
        for part in parts(flat.numel(), HALF // self.size // output.element_size()):
            target = flat[part]
            boxes = self._turn([row[part] for row in rows])
            mine = [box[self.rank * target.nbytes :] for box in boxes]
            algorithms.accumulate([_as(box, target) for box in mine], operation, target)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        for chunk in self._chunks(tensor):
            boxes = self._turn([chunk] if self.rank == root else [])
            if self.rank != root:
                _copy(chunk, boxes[root])

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self.all_gather_uneven(output, input, [input.numel()] * self.size)

    def all_gather_uneven(self, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        pieces = output.view(-1).split(list(counts))
        for part in parts(max(counts), HALF // input.element_size()):
            boxes = self._turn([input.view(-1)[part]])
            for box, piece in zip(boxes, pieces, strict=True):
                _copy(piece[part], box)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        exchange_rows(self, output, input)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """A mailbox has a place for each reader; everyone takes as many turns as the longest parcel of all needs."""
        copy_to_self(self.rank, sends, receives)
        place = HALF // self.size
        longest = torch.tensor([max((x.nbytes for rank, x in (*sends, *receives) if rank != self.rank), default=0)])
        self._host.all_reduce(longest, "max")
        sent, received = (
            [(rank, tensor.view(-1).view(torch.uint8)) for rank, tensor in parcels if rank != self.rank]
            for parcels in (sends, receives)
        )
        for part in parts(int(longest), place):
            boxes = self._turn([tensor[part] for _, tensor in sent], [rank * place for rank, _ in sent])
            for rank, tensor in received:
                _copy(tensor[part], boxes[rank][self.rank * place :])

    def barrier(self, timeout: timedelta | None = None) -> None:
        self._host.barrier(timeout)

    def send(self, tensor: Tensor, rank: int, tag: int) -> Request:
        return self._by_host.send(tensor, rank, tag)

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> Request:
        return self._by_host.receive(tensor, rank, tag)

    def close(self) -> None:
        """Let go of everybody's memory."""
        self._mailboxes = []

    def _turn(self, tensors: Sequence[Tensor], places: Sequence[int] | None = None) -> list[Tensor]:
        """Write `tensors` (at `places`, or one behind the other), and return everybody's half for reading."""
        self._turns += 1
        boxes = [mailbox[(self._turns % 2) * HALF :][:HALF] for mailbox in self._mailboxes]
        start = 0
        for number, tensor in enumerate(tensors):
            _copy(boxes[self.rank][places[number] if places is not None else start :], tensor)
            start += tensor.nbytes
        self._written.record(self._device.current_stream())
        self._written.synchronize()
        self._host.barrier()
        return boxes

    def _chunks(self, tensor: Tensor) -> list[Tensor]:
        flat = tensor.view(-1)
        return [flat[part] for part in parts(flat.numel(), HALF // tensor.element_size())]


def share_gpu(host: Transport, by_host: Transport, device: torch.device) -> SharedTransport | None:
    """A transport through the GPU's own memory, if all ranks are on this one and can show it to each other."""
    if len(set(show(host, gpu_memory.place_of(device)))) > 1:
        return None
    mine: list[Tensor] = []
    mailboxes: list[Tensor] = []

    def offer() -> str:
        mine.append(torch.empty(2 * HALF, dtype=torch.uint8, device=device))
        torch.cuda.current_stream(device).synchronize()
        return "\n".join("mine" if rank == host.rank else gpu_memory.show(mine[0]) for rank in range(host.size))

    offered = show(host, _attempt(offer))

    def open_all() -> str:
        for rank, handles in enumerate(offered):
            if rank == host.rank and mine:
                mailboxes.append(mine[0])
            else:
                mailboxes.append(gpu_memory.opened(handles.splitlines()[host.rank], device))
        return ""

    if any(show(host, _attempt(open_all))):
        return None
    return SharedTransport(host, by_host, mailboxes)


def _attempt(function: Callable[[], str]) -> str:
    """What it returns, or what it raises, in words: the other ranks must know either way."""
    try:
        return function()
    except (RuntimeError, ValueError, SyntaxError, IndexError) as error:
        return f"failed: {error}"


def _as(box: Tensor, like: Tensor) -> Tensor:
    return box[: like.nbytes].view(like.dtype).view(like.shape)


@torch.inference_mode()
def _copy(target: Tensor, source: Tensor) -> None:
    """As many bytes as the smaller of the two holds."""
    target, source = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    count = min(target.numel(), source.numel())
    target[:count].copy_(source[:count])
