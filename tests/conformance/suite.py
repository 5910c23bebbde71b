"""What a rank does: one test of PyTorch's own suite for backends, over Gloo or over Echelon.

The suite (`torch.testing._internal.distributed.distributed_test`, in every wheel) starts new processes for each test;
here the bodies of its tests run one after another in ranks that live on, each with a default group of its own. The
suite skips by the backend's name, mostly when it is imported: so it is imported as Gloo's. Then, for Echelon, the name
by which it makes groups is replaced by one that makes Echelon's and that passes for Gloo's in comparisons.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import unittest
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import torch.distributed as dist

BACKENDS = ("gloo", "echelon")
PASSED = "passed"
SKIPPED = "skipped"
_FOLDERS = ("barrier", "test_dir", "init_dir")  # what the suite expects to find in its TEMP_DIR


class _EchelonInPlaceOfGloo(str):
    """Echelon's name, equal to Gloo's too: the suite asks `BACKEND == "gloo"` to choose CPU tensors."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)


def test_names() -> list[str]:
    """Every test of the suite, in the order in which unittest would run them."""
    return unittest.TestLoader().getTestCaseNames(_test_case())


def run_test(name: str, backend: str, directory: str, seconds: float) -> str:
    """Run one test, on every rank at once; return `passed`, or `skipped: ` and why, or raise what it raised.

    `directory` is the test's own, and the same for all ranks. What the test prints goes to a file there; so do, if it
    is still running after `seconds`, the stacks of this rank's threads.
    """
    suite = _suite()
    test = _test_case()(name)
    if dist.is_initialized():  # the group that a rank of the pool begins with
        dist.destroy_process_group()
    method = getattr(test, name)
    if getattr(method, "__unittest_skip__", False):
        return f"{SKIPPED}: {method.__unittest_skip_why__}"
    with output_to(log(directory, int(os.environ["RANK"])), seconds), _place(suite, backend, directory):
        test.rank = int(os.environ["RANK"])
        test.file_name = str(Path(directory, "init_dir", "first"))
        dist.init_process_group(
            suite.BACKEND,
            init_method=test.init_method,
            rank=test.rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)),
        )
        if backend == "echelon" and type(dist.group.WORLD).__name__ != "EchelonGroup":
            raise RuntimeError(f"the test would not run over Echelon, but over {type(dist.group.WORLD).__name__}")
        test._barrier()
        importlib.import_module("torch.testing._internal.common_utils").set_rng_seed()
        try:
            method()
            outcome = PASSED
        except unittest.SkipTest as skip:
            outcome = f"{SKIPPED}: {skip}"
        test._barrier(wait_for=int(os.environ["WORLD_SIZE"]), timeout=60)
        if dist.is_initialized():
            dist.destroy_process_group()
    dist.set_debug_level_from_env()  # some tests change it, and do not change it back
    return outcome


def prepare(directory: Path) -> None:
    """Make what the suite expects in a test's directory."""
    for folder in _FOLDERS:
        (directory / folder).mkdir()


def log(directory: str | Path, rank: int) -> Path:
    """Where a rank writes what a test prints."""
    return Path(directory, f"rank-{rank}.log")


@cache
def _suite() -> ModuleType:
    """The suite, imported as Gloo's; a `file://` store makes it include the tests that start groups anew."""
    with patch.dict(os.environ, BACKEND="gloo", INIT_METHOD="file://", TEMP_DIR="/nowhere"):
        suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    for backends in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        backends.append("echelon")
    return suite


@cache
def _test_case() -> Any:
    suite = _suite()
    return type("Conformance", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})


@contextlib.contextmanager
def _place(suite: ModuleType, backend: str, directory: str) -> Iterator[None]:
    """The suite's surroundings for one test. What it leaves in the environment is forgotten afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patch.dict(os.environ, BACKEND="gloo", TEMP_DIR=directory, PYTORCH_PRINT_REPRO_ON_FAILURE="0")
        )
        stack.enter_context(patch.object(suite, "INIT_METHOD", f"file://{directory}/init_dir/again"))
        stack.enter_context(patch.object(suite.Barrier, "barrier_id", 0))
        stack.enter_context(patch.object(sys, "exit", skip_with))
        if backend == "echelon":
            stack.enter_context(patch.object(suite, "BACKEND", _EchelonInPlaceOfGloo("echelon")))
        yield


def skip_with(status: int) -> NoReturn:
    """In the suite, a test that cannot run ends its process, with a status that says why."""
    skips = importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS
    raise unittest.SkipTest(next(skip.message for skip in skips.values() if skip.exit_code == status))


@contextlib.contextmanager
def output_to(path: Path, seconds: float) -> Iterator[None]:
    """Send this process's output to a file, that of C++ too; after `seconds`, its threads' stacks as well."""
    with path.open("w") as file, contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            kept = os.dup(stream.fileno())
            os.dup2(file.fileno(), stream.fileno())
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, stream.fileno())
            stack.callback(stream.flush)
        faulthandler.dump_traceback_later(seconds, file=file)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        yield
