"""Loss scaling, saved state, and what users are told."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.parallel import data
from echelon.parallel.optimizer import GROWTH_INTERVAL, Optimizer
from tests.parallel.nets import Net, error
from tests.parallel.training import ADAMW, SGD, STRATEGIES, apply, backward, data_mesh, my_samples


def built(strategy: str, dtype: torch.dtype, make=ADAMW, on_cpu: bool = False) -> tuple[nn.Module, Optimizer]:
    model = apply(Net().to(dtype), strategy, data_mesh(strategy))
    return model, Optimizer(make, model, on_cpu=on_cpu)


def step(model: nn.Module, optimizer: Optimizer, number: int, factor: float = 1) -> float:
    samples = list(my_samples(number, dist.get_rank(), dist.get_world_size(), 1))
    backward(model, lambda loss: optimizer.scale(loss) * factor, samples)
    return optimizer.step(max_norm=1.0)


def start_scale(optimizer: Optimizer, scale: float, good_steps: int = 0) -> None:
    optimizer.load_state_dict(optimizer.state_dict() | {"loss_scale": scale, "good_steps": good_steps})


def overflow(strategy: str) -> None:
    """A gradient of one rank overflows in the second step."""
    model, optimizer = built(strategy, torch.float16, SGD)
    start_scale(optimizer, 256.0, GROWTH_INTERVAL - 1)
    assert math.isfinite(step(model, optimizer, 0))
    assert optimizer.loss_scale == 512  # it was the last of so many good steps
    before = data.full_parameters(model)
    last = dist.get_rank() == dist.get_world_size() - 1
    assert not math.isfinite(step(model, optimizer, 1, factor=1e10 if last else 1))
    assert optimizer.loss_scale == 256
    after = data.full_parameters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    norm = step(model, optimizer, 2)
    assert not torch.equal(before["tokens.weight"], data.full_parameters(model)["tokens.weight"])
    reference, alone = built("replicate", torch.float32, SGD)
    step(reference, alone, 0)
    assert error(norm, step(reference, alone, 2)) < 0.01
    assert error(data.full_parameters(model), data.full_parameters(reference)) < 0.01


def continued(strategy: str, dtype: torch.dtype, on_cpu: bool) -> None:
    """Two runs of one step, the second with the first's state, equal one of two."""
    model, optimizer = built(strategy, dtype, on_cpu=on_cpu)
    step(model, optimizer, 0)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, optimizer.state_dict()
    )
    step(model, optimizer, 1)
    other, resumed = built(strategy, dtype, on_cpu=on_cpu)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
    resumed.load_state_dict(state)
    step(other, resumed, 1)
    expected = data.full_parameters(model)
    assert all(torch.equal(value, expected[name]) for name, value in data.full_parameters(other).items())


def second_sum() -> None:
    model = apply(Net(), "replicate", data_mesh("replicate"))
    samples = list(my_samples(0, dist.get_rank(), dist.get_world_size(), 1))
    backward(model, lambda loss: loss, samples)
    with pytest.raises(RuntimeError, match=r"data\.accumulate"):
        backward(model, lambda loss: loss, samples)


def without_our_optimizer() -> None:
    """A replicated model trains with a plain optimizer too."""
    model = apply(Net(), "replicate", data_mesh("replicate"))
    other, optimizer = built("replicate", torch.float32)
    plain = ADAMW([parameter for parameter in model.parameters() if parameter.requires_grad])
    for number in range(3):
        samples = list(my_samples(number, dist.get_rank(), dist.get_world_size(), 1))
        backward(model, lambda loss: loss, samples)
        plain.step()
        plain.zero_grad()
        backward(other, optimizer.scale, samples)
        optimizer.step()
    assert error(data.full_parameters(model), data.full_parameters(other)) == 0


def late() -> None:
    """Who accumulates all, or reaches no parameter on one rank, has the sums at the step."""
    norms = []
    for accumulates in (False, True):
        model, optimizer = built("shard 1", torch.float64)
        samples = list(my_samples(0, dist.get_rank(), dist.get_world_size(), 1))
        if accumulates:
            with data.accumulate(model):
                backward(model, optimizer.scale, samples)
        elif dist.get_rank() == 0 or norms:
            backward(model, optimizer.scale, samples)
        norms.append(optimizer.step())
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert norms[0] != norms[1]


def mistakes() -> None:
    mesh = data_mesh("")
    model = data.replicate(nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="a data strategy already"):
        data.shard(model, mesh, stage=3)
    with pytest.raises(ValueError, match=r"stage 0 is data\.replicate"):
        data.shard(nn.Linear(2, 2), mesh, stage=0)
    with pytest.raises(ValueError, match="one dimension"):
        data.shard(nn.Linear(2, 2), data_mesh("hybrid"), stage=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overflow_on_one_rank(ranks, strategy):
    ranks(4, overflow, strategy)


@pytest.mark.parametrize(("dtype", "on_cpu"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_dict(ranks, strategy, dtype, on_cpu):
    ranks(2, continued, strategy, dtype, on_cpu)


@pytest.mark.parametrize("body", [second_sum, without_our_optimizer, late, mistakes], ids=lambda body: body.__name__)
def test_on_two_ranks(ranks, body):
    ranks(2, body)


def test_one_process():
    """A plain model, without a strategy and without ranks."""
    model, other = Net(), Net()
    optimizer = Optimizer(partial(torch.optim.SGD, lr=0.1), model)
    plain = torch.optim.SGD([parameter for parameter in other.parameters() if parameter.requires_grad], lr=0.1)
    tokens, targets = next(my_samples(0, 0, 1, 1))
    for each in (model, other):
        each(tokens, targets).backward()
    plain.step()
    optimizer.step()
    assert error(data.full_parameters(model), data.full_parameters(other)) == 0
