"""What a step sends is what the shapes say, byte for byte; and the first of it is on its way while backward runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.comm.records import now
from echelon.parallel import data
from echelon.parallel.data_traffic import Held, held, traffic
from echelon.parallel.optimizer import Optimizer
from tests.parallel.nets import Net
from tests.parallel.training import SGD, STRATEGIES, apply, backward, data_mesh, my_samples

NORM = 8  # bytes, all-reduced over the world in every step
STAGES = {"replicate": 0, "shard 1": 1, "shard 2": 2, "shard 3": 3, "hybrid": 3}


def samples(backwards: int) -> list:
    return list(my_samples(0, dist.get_rank(), dist.get_world_size(), backwards))


def one_step(strategy: str, backwards: int, dtype: torch.dtype) -> tuple[Counter, dict[str, int]]:
    """Payload by operation, recorded and computed."""
    n = dist.get_world_size()
    expected = traffic(
        held(Net().to(dtype)),
        STAGES[strategy],
        n // 2 if strategy == "hybrid" else n,
        replicas=2 if strategy == "hybrid" else 1,
        backwards=backwards,
    )
    model = apply(Net().to(dtype), strategy, data_mesh(strategy))
    optimizer = Optimizer(SGD, model)
    seen: Counter = Counter()
    for _ in range(2):  # the first step sets things up
        seen.clear()
        with echelon.comm.record() as log:
            backward(model, optimizer.scale, samples(backwards))
            optimizer.step()
        for record in log:
            seen[record.operation] += record.payload
    seen["all_reduce"] -= NORM
    return +seen, expected


def kept_whole() -> tuple[int, int]:
    """Gathered in a step of stage 3 whose blocks stay whole from forward to backward: recorded and computed."""
    model = data.shard(Net(), data_mesh("shard 3"), stage=3, reshard_after_forward=False)
    with echelon.comm.record() as log:
        backward(model, lambda loss: loss, samples(1))
    expected = traffic(held(Net()), 3, dist.get_world_size(), reshard_after_forward=False)
    return sum(r.payload for r in log if "gather" in r.operation), expected["all_gather_single"]


def early(strategy: str) -> tuple[list[int], int]:
    """When reductions were enqueued, and when the last gradient of all came."""
    net = Net()
    last = []
    net.tokens.weight.register_post_accumulate_grad_hook(lambda _: last.append(now()))
    model = apply(net, strategy, data_mesh(strategy))
    with echelon.comm.record() as log:
        backward(model, lambda loss: loss, samples(1))
    return [record.enqueued for record in log], last[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 4])
def test_bytes(ranks, strategy, size, backwards, dtype):
    for seen, expected in ranks(size, one_step, strategy, backwards, dtype):
        assert seen == expected


def test_bytes_without_resharding(ranks):
    for seen, expected in ranks(2, kept_whole):
        assert seen == expected


def test_closed_forms():
    """Without padding, with Ψ bytes of blocks alone: Ψ, 2Ψ, 2Ψ, 3Ψ."""
    blocks = {f"blocks.{index}": [Held((64, 32)), Held((64,))] for index in range(3)} | {"": []}
    size = 3 * (64 * 32 + 64) * 4
    totals = [sum(traffic(blocks, stage, ranks=4).values()) for stage in range(4)]
    assert totals == [size, 2 * size, 2 * size, 3 * size]
    hybrid = traffic(blocks, 3, ranks=4, replicas=2)
    assert hybrid == traffic(blocks, 3, ranks=4) | {"all_reduce": size // 4}


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_overlap(ranks, strategy):
    for enqueued, last in ranks(2, early, strategy):
        assert len(enqueued) == 4  # three blocks and the rest
        assert enqueued == sorted(enqueued)
        assert all(moment < last for moment in enqueued[:3])
