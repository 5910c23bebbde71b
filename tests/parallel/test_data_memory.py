"""Each rank holds what the anatomy of ZeRO says: counted from the tensors that are alive, each piece of memory once."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.comm.torch_compat import local_tensor
from echelon.parallel import data
from echelon.parallel.optimizer import Optimizer
from tests.parallel.training import STRATEGIES, apply, data_mesh

WIDTH, BLOCKS = 64, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def memory() -> dict[int, torch.UntypedStorage]:
    """All that is alive in this process, by address; what only a collection would free is alive."""
    real = (Tensor, nn.Parameter, DTensor)  # and none of the fake ones that a compiler may have left
    tensors = [each for each in gc.get_objects() if type(each) in real]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = [local_tensor(each).untyped_storage() for each in tensors if not each.is_meta]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def measured(strategy: str, dtype: torch.dtype) -> dict[str, int]:
    """Bytes held after the first of two backward passes, after the second, and after the step."""
    gc.collect()
    before = memory()  # and kept, so that no address is given out again

    def held() -> int:
        return sum(storage.nbytes() for address, storage in memory().items() if address not in before)

    model = apply(Stack().to(dtype), strategy, data_mesh(strategy))
    optimizer = Optimizer(torch.optim.AdamW, model)
    model(torch.ones(1, WIDTH, dtype=dtype)).backward()
    optimizer.step()
    with data.accumulate(model):
        model(torch.ones(1, WIDTH, dtype=dtype)).backward()
    accumulating = held()
    model(torch.ones(1, WIDTH, dtype=dtype)).backward()
    accumulated = held()
    optimizer.step()
    return {"accumulating": accumulating, "accumulated": accumulated, "between steps": held()}


def anatomy(strategy: str, dtype: torch.dtype, d: int) -> dict[str, float]:
    """The same by the formulas: M_m = k_l·p (÷d if z = 3), M_o = 3·k_h·p (÷d if z ≥ 1; without the master copy, which
    the parameters are in fp32, 2·k_h·p), M_g = k_l·p (÷d if z ≥ 2, and in stage 1 once they are reduced).
    """
    p = sum(parameter.numel() for parameter in Stack().parameters())
    z = 0 if strategy == "replicate" else 3 if strategy == "hybrid" else int(strategy[-1])
    k_l, k_h = dtype.itemsize, 4
    parameters = k_l * p / (d if z == 3 else 1)
    state = (3 if k_l < k_h else 2) * k_h * p / (d if z >= 1 else 1)
    held = parameters + state
    return {
        "accumulating": held + k_l * p / (d if z >= 2 else 1),
        "accumulated": held + k_l * p / (d if z >= 1 else 1),
        "between steps": held,
    }


def peak(stage: int) -> int:
    """The most bytes of gradients that a backward pass held at the moments when one came."""
    model = Stack()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(gradients()))
    model = data.shard(model, data_mesh(""), stage)

    def gradients() -> int:
        tensors = [parameter.grad for parameter in model.parameters()]
        for bucket in model.gradient_reducer.buckets:
            tensors += [bucket.flat, bucket.arriving, bucket.reduced]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if each is not None}
        return sum(storage.nbytes() for storage in storages.values())

    for _ in range(2):
        with data.accumulate(model):
            model(torch.ones(1, WIDTH)).backward()
    model(torch.ones(1, WIDTH)).backward()
    return max(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 4])
def test_held(ranks, strategy, size, dtype):
    expected = anatomy(strategy, dtype, size // 2 if strategy == "hybrid" else size)
    for seen in ranks(size, measured, strategy, dtype):
        for moment, size_seen in seen.items():
            assert size_seen == pytest.approx(expected[moment], rel=0.02), (moment, seen, expected)


def test_peak(ranks):
    """Stage 2 never holds all gradients: its part, two blocks on their way, and what has just come."""
    block = sum(parameter.nbytes for parameter in Block().parameters())
    whole = sum(parameter.nbytes for parameter in Stack().parameters())
    assert all(seen <= whole / 4 + 3.5 * block < whole for seen in ranks(4, peak, 2))
    assert all(whole <= seen <= whole + 2.5 * block for seen in ranks(4, peak, 1))
