"""What `import torch` gets from Echelon: the backend, and no harm."""

from __future__ import annotations

import subprocess
import sys

from tests.launch.jobs import ROOT, environment


def python(code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(**extra), cwd=ROOT, check=False
    )


def test_torch_alone_knows_the_backend():
    job = python(
        "import torch, sys; print(torch.distributed.is_backend_available('echelon'), 'echelon' in sys.modules)"
    )
    assert job.stdout.split() == ["True", "True"], job.stderr


def test_the_hook_starts_nothing():
    """Neither MPI nor the modules that need it are loaded by `import torch`."""
    kinds = ("mpi4py", "echelon.comm.", "rich", "typer")
    code = f"import torch, sys; print([m for m in sys.modules if m.startswith({kinds})])"
    assert python(code).stdout.strip() == "['echelon.comm.torch_compat']"


def test_import_echelon_registers_where_torch_does_not():
    for order in ("import echelon, torch", "import torch, echelon"):
        code = f"{order}; print(torch.distributed.is_backend_available('echelon'))"
        assert python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.strip() == "True"


def test_a_broken_hook_does_not_break_torch():
    code = """
import echelon.comm.torch_compat as hook
def broken(): raise OSError("on purpose")
hook._register = broken
import torch
print(torch.ones(2).sum().item())
"""
    job = python(code)
    assert job.stdout.strip() == "2.0"
    assert "the backend 'echelon' is not available: OSError: on purpose" in job.stderr


def test_other_backends_are_untouched():
    code = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
dist.monitored_barrier()
print(dist.get_backend(), dist.is_mpi_available(), type(dist.group.WORLD).__name__)
try: dist.split_group(split_ranks=[[0]])
except RuntimeError as error: print(error)
"""
    first, second = python(code).stdout.splitlines()
    assert first == "gloo False ProcessGroup"
    assert "not safe to split" in second
