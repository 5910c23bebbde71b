"""What a rank does: one test of a test file of PyTorch's repository, over Gloo or over Echelon.

The test cases of these files start processes for each test; here the bodies of the tests run one after another in
ranks that live on. What is asked of GPUs is granted to CPUs, one for each rank, and wherever a test makes a group over
Gloo it gets one over Echelon.

Left out are test cases that say nothing of a backend: those of threads, of a fake group and of a single process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.conformance.suite import PASSED, SKIPPED, log, output_to, skip_with


def test_names(path: str) -> list[str]:
    """Every test of a file that runs on processes of its own, as `file::class::test`."""
    return [
        f"{path}::{name}::{test}"
        for name, case in vars(_load(path)).items()
        if _runs_on_processes(case) and case.__module__ == Path(path).stem
        for test in unittest.TestLoader().getTestCaseNames(case)
    ]


def run_test(name: str, backend: str, directory: str, seconds: float) -> str:
    """Run one test, on every rank at once: as `suite.run_test` does."""
    path, case_name, test = name.split("::")
    if dist.is_initialized():  # the group that a rank of the pool begins with
        dist.destroy_process_group()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with output_to(log(directory, rank), seconds), _surroundings(backend):
        case = getattr(_load(path), case_name)
        for skippable in (case, getattr(case, test)):
            if getattr(skippable, "__unittest_skip__", False):
                return f"{SKIPPED}: {skippable.__unittest_skip_why__}"
        wanted = _world_size(case, test)
        if wanted != size:
            return f"{SKIPPED}: for {wanted} ranks"
        try:
            _run_body(case, test, rank, size, str(Path(directory, "store")))
        except unittest.SkipTest as skip:
            return f"{SKIPPED}: {skip}"
        finally:
            torch._dynamo.reset()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    return PASSED


def _run_body(case: Any, test: str, rank: int, size: int, store: str) -> None:
    """What a process does that the test case would have started."""
    common = _internal("common_distributed")
    if issubclass(case, common.MultiProcContinuousTest):
        here = type(case.__name__, (case,), {"rank": rank, "world_size": size})
        here._init_pg(rank, size, store)
        here._run_test_given_id(test)
    else:
        here = type(case.__name__, (case,), {"world_size": size, "run_test": _run_method})
        here._run(rank, test, store, None)


def _run_method(case: Any, test: str, _pipe: None) -> None:
    """In place of `MultiProcessTestCase.run_test`, which ends the process when a test fails."""
    _internal("common_utils").set_rng_seed()
    getattr(case, test)()


def _runs_on_processes(case: object) -> bool:
    common, dtensor = _internal("common_distributed"), _internal("distributed._tensor.common_dtensor")
    return (
        isinstance(case, type)
        and issubclass(case, common.MultiProcessTestCase | common.MultiProcContinuousTest)
        and not issubclass(case, dtensor.LocalDTensorTestBase | dtensor.LocalDTensorContinuousTestBase)
        and not getattr(case, "fake_pg", False)
    )


def _world_size(case: Any, test: str) -> int:
    """The number of ranks that a test case is for; some leave it to the number of devices."""
    size = int(case(test).world_size)
    return size if size > 0 else int(os.environ["WORLD_SIZE"])


@cache
def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that what the tests pickle is found again
    with _as_many_devices_as_ranks():
        spec.loader.exec_module(module)
    return module


def _internal(name: str) -> Any:
    return importlib.import_module(f"torch.testing._internal.{name}")


@contextlib.contextmanager
def _surroundings(backend: str) -> Iterator[None]:
    """The tests' surroundings. What they leave in the environment is forgotten afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, PYTORCH_PRINT_REPRO_ON_FAILURE="0"))
        stack.enter_context(patch.object(sys, "exit", skip_with))
        stack.enter_context(_as_many_devices_as_ranks())
        if backend == "echelon":
            stack.enter_context(_echelon_in_place_of_gloo())
        yield


@contextlib.contextmanager
def _as_many_devices_as_ranks() -> Iterator[None]:
    """Without GPUs the test cases choose CPU tensors, but most then skip for want of a GPU for each rank."""
    size = int(os.environ["WORLD_SIZE"])

    def skip_if_lt_x_gpu(devices: int, **_: Any) -> Callable[[Any], Any]:
        return unittest.skipIf(devices > size, f"for {devices} ranks")

    with contextlib.ExitStack() as stack:
        for devices in (torch.accelerator, torch.cpu):
            stack.enter_context(patch.object(devices, "device_count", lambda: size))
        stack.enter_context(patch.object(_internal("common_fsdp"), "DEVICE_COUNT", size))
        for module in ("common_distributed", "distributed._tensor.common_dtensor"):
            stack.enter_context(patch.object(_internal(module), "skip_if_lt_x_gpu", skip_if_lt_x_gpu))
        yield


@contextlib.contextmanager
def _echelon_in_place_of_gloo() -> Iterator[None]:
    """Every way to make a group ends in one function of PyTorch's: there the backend's name is replaced."""
    make = dist.distributed_c10d._new_process_group_helper

    @wraps(make)
    def make_echelon(size: int, rank: int, ranks: list[int], backend: str, *others: Any, **options: Any) -> Any:
        chosen = "echelon" if "gloo" in backend or backend == "undefined" else backend
        return make(size, rank, ranks, chosen, *others, **options)

    with patch.object(dist.distributed_c10d, "_new_process_group_helper", make_echelon):
        yield
