"""Processes that work for one: each has a pipe of its own, and one task at a time.

Tasks go round the workers in turn, and results come back in the order of the tasks. A pipe of its own means that a
worker which is killed, even in the middle of an answer, is noticed, and that workers end when the first process does,
however that ends. (The pools of Python's library share a pipe among workers, and wait for ever in the first case.)
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from echelon.train.data.errors import DataError

Task = TypeVar("Task")


def in_order(
    function: Callable[..., bytes], tasks: Iterable[Task], workers: int, *arguments: Any
) -> Generator[tuple[Task, bytes], None, None]:
    """Each task with `function(task, *arguments)`, computed by so many processes; what it raises is raised here."""
    context = get_context("spawn")
    waiting: deque[tuple[Task, Connection]] = deque()  # what each worker is at, the oldest first
    processes = []
    try:
        for number, task in enumerate(tasks):
            answered = []
            if number < workers:
                pipe, theirs = context.Pipe()
                processes.append(context.Process(target=_work, args=(theirs, function, arguments), daemon=True))
                processes[-1].start()
                theirs.close()
            else:
                first, pipe = waiting.popleft()
                answered = [(first, _answer(pipe))]
            waiting.append((task, pipe))
            with _alive():
                pipe.send(task)
            yield from answered
        for task, pipe in waiting:
            yield task, _answer(pipe)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _answer(pipe: Connection) -> bytes:
    with _alive():
        answer: bytes | Exception = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Whatever a pipe says when nobody is at its other end."""
    try:
        yield
    except (EOFError, OSError):
        raise DataError("a process that tokenised has died, perhaps for want of memory: try fewer workers") from None


def _work(pipe: Connection, function: Callable[..., bytes], arguments: tuple[Any, ...]) -> None:
    """What a worker does until nobody is at the other end of its pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, but it is the first that ends the rest
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task = pipe.recv()
            try:
                answer: bytes | Exception = function(task, *arguments)
            except Exception as error:
                answer = error
            pipe.send(answer)
