"""What a loader puts on a GPU is what it puts on the CPU, with the positions that attention compares with."""

from __future__ import annotations

import pytest
import torch

from echelon.parallel import sequence
from echelon.train.data.loader import Loader
from echelon.train.data.order import Order
from tests.train.data.grids import Counted, grids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_step_on_the_gpu():
    for grid in grids(dp=2, cp=2):
        steps = []
        for device in ("cpu", "cuda"):
            loader = Loader(Counted(50, 8), Order(50, 0), grid, batch=8, micro_batch=2, device=device)
            steps.append([given for place in (0, 8, 16) for given in loader.load(place)])
            loader.close()
        for expected, given in zip(*steps, strict=True):
            assert {tensor.device.type for tensor in given.values()} == {"cuda"}
            assert given.keys() == expected.keys()
            assert all(torch.equal(given[name].cpu(), expected[name]) for name in given)
            place = "ring", True, 8, 2, grid.mesh("cp").get_local_rank()
            assert given["positions_S"] is sequence.positions(*place, given["positions_S"].device)
