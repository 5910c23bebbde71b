"""CUDA tensors under torchrun go over NCCL, CPU tensors of the same group over Gloo.

NCCL refuses two ranks on one GPU, so on a machine with one this is a world of one: every call is made, nothing crosses
a wire.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.launch.jobs import SCRIPTS, result, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_nccl_beside_gloo():
    ranks = torch.cuda.device_count()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    assert result(run(*launcher, SCRIPTS / "on_gpu.py")) == {"cpu": "gloo", "cuda": "nccl", "ranks": ranks}
