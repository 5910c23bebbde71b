"""Events for PyTorch's profiler: `echelon:all_reduce` and so on, with the shapes of what goes in.

As those of PyTorch's own backends, they are marked asynchronous, since they may overlap with what the caller does. The
profiler marks so what begins in one thread and ends in another. An event of this kind ends when its last reference
goes (leaving it as a context would do nothing in a thread that is not itself profiled).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import _profiler_enabled

profiling = _profiler_enabled


def begin(name: str, inputs: list[Tensor]) -> Callable[[], None]:
    """Begin an event; what is returned ends it."""
    event = [_RecordFunctionFast(f"echelon:{name}", inputs, {})]
    event[0].__enter__()
    return lambda: _other_thread().submit(event.clear).result()


@cache
def _other_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="echelon-profile")
