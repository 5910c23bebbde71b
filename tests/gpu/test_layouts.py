"""Rows of the matrix in bf16 on ranks that share one GPU: the losses of one process in fp32, within bf16's rounding."""

from __future__ import annotations

import pytest
import torch

from echelon.parallel.layout import Layout
from tests.launch.jobs import echelon
from tests.parallel.matrix import ROWS, train
from tests.parallel.test_matrix import TOLERANCES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
NAMES = [
    "replicate",
    "shard 2",
    "shard 3",
    "tp",
    "ring",
    "ulysses",
    "dp × tp",
    "dp × ring",
    "shard 3 × tp",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_losses_in_bf16(ranks, family, name):
    [row] = [row for row in ROWS[family] if row.name == name]
    for told in ranks(row.layout.size, train, family, row, "bf16", "adamw", "cuda", timeout=120):
        assert told["loss"] <= TOLERANCES["bf16"]


def chosen() -> str:
    """On which GPU a rank works that has said nothing but the layout."""
    grid = Layout(dp=-1).build("cuda")
    return str(torch.zeros(1, device=grid.mesh("dp").device_type).device)


def test_ranks_share_a_gpu(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "import echelon\n"  # for where it is not installed
        "dist.init_process_group('echelon')\n"
        "from tests.gpu.test_layouts import chosen\n"
        "print('on', chosen())\n"
    )
    done = echelon("run", "-n", "2", str(script))
    assert done.stdout.count("on cuda:") == 2, done.stdout + done.stderr
