"""Data parallelism on ranks that share one GPU, the optimizer's state there or in the host's memory: as one process on
the CPU does.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.nets import SplitNet, train_alone
from tests.parallel.training import ADAMW, SGD, STRATEGIES, apply, difference, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def errors_on_gpu(strategy: str, dtype: torch.dtype, on_cpu: bool) -> dict[str, float]:
    n = dist.get_world_size()
    torch.cuda.set_device(0)
    shape, names = ((2, n // 2), ("replicate", "shard")) if strategy == "hybrid" else ((n,), ("dp",))
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    make = SGD if dtype == torch.float64 else ADAMW
    model = apply(SplitNet().to("cuda:0", dtype), strategy, mesh)
    result = train(model, mesh, make, 0.5, backwards=2, on_cpu=on_cpu)
    return difference(result, train_alone(SplitNet().to(dtype), make, 0.5))


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_parallelism(ranks, strategy, dtype, tolerance, on_cpu):
    for seen in ranks(4, errors_on_gpu, strategy, dtype, on_cpu):
        assert max(seen.values()) < tolerance, seen
