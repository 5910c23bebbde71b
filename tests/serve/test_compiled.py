"""The kernels are compiled for GPUs that need not be there: they fit, and none is compiled while somebody waits."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton, which compiles kernels without a GPU, too")


def told(what: str, gpu: str) -> Any:
    """In a process of its own, since here kernels are interpreted."""
    command = [sys.executable, "-m", "tests.serve.compiled", what, gpu]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def kernels_of(module: ModuleType) -> set[str]:
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    return {each.name for each in functions if any("triton.jit" in ast.unparse(mark) for mark in each.decorator_list)}


@pytest.mark.parametrize("gpu", ["H200", "A100", "RTX 4090"])
def test_all_kernels_are_compiled_and_fit(gpu: str) -> None:
    from echelon.parallel import kernels as training
    from echelon.serve import drawing
    from echelon.serve import kernels as serving

    missing = {"_mix", "_as_whole", "_as_float", "_weight", "_from", "_seek"}  # parts of others
    if gpu == "A100":
        missing |= {"_in_8_bits", "_cast_block", "_sum_rows", "_transpose"}  # of 8-bit floats, which it does not have
    found = told("resources", gpu)
    assert {each["kernel"] for each in found} == set().union(*map(kernels_of, (serving, drawing, training))) - missing
    for each in found:
        assert each["shared"] <= each["most shared"], each
        if gpu == "H200" and each["dtype"] == "torch.bfloat16":
            assert each["stack"] == 0, f"registers do not suffice: {each}"


def test_none_is_compiled_after_the_engine_has_begun() -> None:
    """Whatever steps come, with graphs and without."""
    for engine, late in told("late", "H200").items():
        assert late == [], engine
