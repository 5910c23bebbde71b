"""The order between a CUDA stream and an operation that a host thread carries out.

To whoever calls, an operation on CUDA tensors belongs to the stream that was current: it comes after what was on it
before, and what follows on it (for an asynchronous one, after `wait`) sees the result. Carried out in another thread
and on a stream of its own, it is tied to the caller's by two events, one before and one after; no device is
synchronised.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor


class Ordering:
    """One operation's place on the stream that is current where this is made; `stream` is where it will run."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self._stream = stream
        self._before, self._after = torch.cuda.Event(), torch.cuda.Event()
        self._before.record(torch.cuda.current_stream(device))

    def run(self, tensors: list[Tensor], function: Callable[..., Any], *arguments: Any) -> Any:
        """Carry it out, in any thread. `tensors` are kept from being used for anything else before it is done."""
        with self.there():
            self._stream.wait_event(self._before)
            result = function(*arguments)
            for tensor in tensors:
                for dense in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                    if dense.is_cuda:
                        dense.record_stream(self._stream)
            self._after.record(self._stream)
        return result

    def join(self) -> None:
        """Let what follows on the current stream come after it."""
        torch.cuda.current_stream(self.device).wait_event(self._after)

    def is_over(self) -> bool:
        return bool(self._after.query())

    def there(self) -> AbstractContextManager[object]:
        """With the operation's device and stream as the current ones."""
        stack = ExitStack()
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self._stream))
        return stack
