"""The anatomy of memory: published figures, what PyTorch really holds, and what must be true of any shapes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

from echelon.parallel.layout import Layout, Stage
from echelon.plan.memory import BYTES, STATE, Held, Portion, Training, Workload, activations, by_rank, held, shapes_of

GIB = 2**30
BILLION = 10**9


def matrix(parameters: int) -> dict[str, tuple[int, int]]:
    return {"blocks.0.weight": (1000, parameters // 1000)}


@pytest.mark.parametrize(
    ("billions", "weights", "gradients", "optimizer"), [(2, 7.5, 7.5, 22), (8, 30, 30, 90), (32, 120, 120, 360)]
)
def test_fp32_with_adamw(billions, weights, gradients, optimizer):
    """The published figures count a master copy; PyTorch's AdamW has none in fp32, and so a third less."""
    published = held(matrix(billions * BILLION), Layout(), Training(master=True))
    figures = [published.parameters / GIB, published.gradients / GIB, published.optimizer / GIB]
    assert figures == pytest.approx([weights, gradients, optimizer], rel=0.02)
    assert held(matrix(billions * BILLION), Layout(), Training()).optimizer * 3 == published.optimizer * 2


def test_sgd_takes_8_bytes_in_all():
    assert held(matrix(BILLION), Layout(), Training(optimizer="sgd")).device == 8 * BILLION


@pytest.mark.parametrize("precision", BYTES)
def test_a_trillion_parameters_on_1024_devices(precision):
    assert held(matrix(10**12), Layout(dp=1024), Training(stage=3, precision=precision)).device == pytest.approx(
        16e9, rel=0.03
    )


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", BYTES)
@pytest.mark.parametrize("optimizer", STATE)
def test_the_anatomy(stage, precision, optimizer):
    """Where shapes divide evenly: what each stage divides."""
    d, shapes = 8, {f"blocks.{i}.{name}.weight": (64, 32) for i in range(3) for name in ("up", "down")}
    p = sum(map(math.prod, shapes.values()))
    low = BYTES[precision]
    master = 4 if precision != "fp32" else 0
    expected = Held(
        p * low // (d if stage == 3 else 1),
        p * low // (d if stage >= 2 else 1),
        p * (STATE[optimizer] + master) // (d if stage >= 1 else 1),
    )
    training = Training(stage=stage, precision=precision, optimizer=optimizer)
    assert by_rank(shapes, Layout(dp=d), training) == [expected] * d
    assert by_rank(shapes, Layout(dp=2, cp=4), training) == [expected] * d


def test_hybrid_sharding_divides_inside_a_replica():
    shapes, training = {"blocks.0.weight": (64, 32)}, Training(stage=3)
    whole, hybrid = (held(shapes, Layout(dp=8, replicate=n), training).device for n in (1, 4))
    assert hybrid == 4 * whole


def test_by_hand():
    """A block of 10 + 3 elements over 4 ranks in bf16: 16 + 8 in the bucket, which 32 makes divisible; parts of 8."""
    shapes = {"blocks.0.weight": (5, 2), "blocks.0.bias": (3,)}
    ranks = by_rank(shapes, Layout(dp=4), Training(stage=2, precision="bf16"))
    assert [rank.parameters for rank in ranks] == [64] * 4
    assert [rank.gradients for rank in ranks] == [16] * 4
    assert [rank.optimizer for rank in ranks] == [12 * count for count in (8, 2, 3, 0)]
    assert [rank.gradients for rank in by_rank(shapes, Layout(dp=4), Training(stage=1, precision="bf16"))] == [26] * 4
    ranks = by_rank(shapes, Layout(dp=4), Training(stage=3))
    assert [rank.parameters for rank in ranks] == [4 * (2 * 2 + 1)] * 4
    assert [rank.optimizer for rank in ranks] == [8 * count for count in (4 + 1, 4 + 1, 2 + 1, 0)]


def test_tensor_parallelism_splits_what_it_is_told_to():
    shapes = {"blocks.0.mlp.up.weight": (6, 4), "blocks.0.mlp.down.weight": (4, 6), "norm.weight": (5,)}
    dims = {"blocks.0.mlp.up.weight": 0, "blocks.0.mlp.down.weight": 1}
    ranks = by_rank(shapes, Layout(tp=4), Training(), split=dims.get)
    assert [rank.parameters for rank in ranks] == [4 * (2 * (chunk * 4) + 5) for chunk in (2, 2, 2, 0)]


def test_an_optimizer_on_the_host():
    shapes = matrix(8000)
    beside, away = (held(shapes, Layout(), Training(precision="bf16", on_cpu=on_cpu)) for on_cpu in (False, True))
    assert (away.optimizer, away.host) == (0, beside.optimizer)
    assert held(shapes, Layout(), Training(on_cpu=True)).host == 8000 * 12  # what it updates is a copy, in fp32 too


def test_pipeline_stages_hold_their_own():
    first = Portion(shapes={"blocks.0.weight": (10,)})
    second = Portion(shapes={"blocks.0.weight": (10,), "head.weight": (20,)}, versions=2)
    layout = Layout(stages=[Stage(tp=2), Stage()], dp=2)
    ranks = by_rank([first, first, second], layout, Training(), split={}.get)
    assert [rank.parameters for rank in ranks] == [40] * 4 + [240] * 2
    assert [rank.gradients for rank in ranks] == [40] * 4 + [120] * 2
    message = r"Layout\(pp=2\) has pipelines of 2, but there are portions for 1: give a list"
    with pytest.raises(ValueError, match=message):
        held(first.shapes, Layout(pp=2), Training())


def test_gradients_that_are_kept_whole_are_so_in_every_stage():
    shapes = {"blocks.0.weight": (400, 2), "head.weight": (200,)}
    for stage in range(4):
        training = Training(stage=stage, precision="bf16")
        kept, usual = (Portion(shapes=shapes, keeps_gradients=keeps) for keeps in (True, False))
        ranks = by_rank([kept, usual], Layout(dp=2, pp=2), training)
        assert {rank.gradients for rank in ranks[:2]} == {2000}
        assert max(rank.gradients for rank in ranks[2:]) <= (2000 if stage < 2 else 1100)


@pytest.mark.parametrize("settings", [{"stage": 4}, {"precision": "fp8"}, {"optimizer": "lion"}], ids=str)
def test_what_is_not_known(settings):
    [[name, value]] = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} is not known: there are "):
        Training(**settings)


shapes = st.dictionaries(
    st.sampled_from([f"{unit}.{name}" for unit in ("tokens", "blocks.0", "blocks.1") for name in "abc"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    min_size=1,
)
trainings = st.builds(
    Training,
    stage=st.integers(0, 3),
    precision=st.sampled_from(list(BYTES)),
    optimizer=st.sampled_from(list(STATE)),
    on_cpu=st.booleans(),
)


@given(shapes, trainings, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_every_parameter_is_updated_once_in_a_replica(shapes, training, shard, cp, replicate):
    layout = Layout(dp=replicate * shard, cp=cp, replicate=replicate)
    ranks = by_rank(shapes, layout, training)
    copies = {0: layout.size, 1: 1, 2: 1, 3: replicate}[training.stage]
    bytes_each = STATE[training.optimizer] + 4 * training.has_master
    count = sum(map(math.prod, shapes.values()))
    assert sum(rank.optimizer + rank.host for rank in ranks) == copies * count * bytes_each
    assert all((rank.host if training.on_cpu is False else rank.optimizer) == 0 for rank in ranks)


@given(shapes, trainings, st.integers(2, 5))
def test_what_is_divided_holds_all_and_little_more(shapes, training, d):
    """All ranks together hold at least everything; one rank at most its share, and what padding adds."""
    ranks = by_rank(shapes, Layout(dp=d), training)
    low = BYTES[training.precision]
    count = sum(map(math.prod, shapes.values()))
    rows = sum(math.prod(shape[1:]) for shape in shapes.values())  # one more of each parameter
    padding = {0: 0, 1: 16 * (len(shapes) + 3 * d), 2: 16 * (len(shapes) + 3 * d), 3: 4 * rows}[training.stage]
    for kind, divided in (("parameters", training.stage == 3), ("gradients", training.stage >= 2)):
        total = sum(getattr(rank, kind) for rank in ranks)
        assert total >= count * low * (1 if divided else d)
        most = max(getattr(rank, kind) for rank in ranks)
        assert most <= count * low / (d if divided else 1) + padding


@given(shapes, st.integers(1, 4))
def test_a_higher_stage_never_leaves_the_optimizer_more(shapes, d):
    most = [max(rank.optimizer for rank in by_rank(shapes, Layout(dp=d), Training(stage=stage))) for stage in (0, 1)]
    assert most[0] >= most[1]


def test_activations_of_the_formula():
    """bf16, in bytes a layer: s·b·h·(34 + 5·a·s/h)."""
    work = Workload(batch=4, sequence=2048, hidden=6144, layers=48, heads=64)
    per_layer = 2048 * 4 * 6144 * 34 + 2048 * 4 * 5 * 64 * 2048
    assert activations(work, "bf16") == 48 * per_layer
    assert activations(work, "bf16", tp=8, cp=2) == 3 * per_layer
    assert held(matrix(1000), Layout(tp=8, cp=2), Training(precision="bf16"), work, split={}.get).activations == (
        3 * per_layer
    )
    with pytest.raises(ValueError, match=r"Layout\(tp=2\) splits matrices: say along which dimension"):
        held(matrix(1000), Layout(tp=2), Training())


sizes = st.builds(
    dict,
    batch=st.integers(1, 8),
    sequence=st.integers(1, 4096),
    hidden=st.integers(1, 4096),
    layers=st.integers(2, 64),
    heads=st.integers(1, 64),
)


@given(sizes, st.sampled_from(list(BYTES)))
def test_activations_grow_with_what_is_kept(sizes, precision):
    none, selective, full = (
        activations(Workload(**sizes, checkpointing=kind), precision) for kind in ("none", "selective", "full")
    )
    assert none > selective > full
    assert activations(Workload(**sizes | {"batch": 2 * sizes["batch"]}), precision) == 2 * none
    assert activations(Workload(**sizes | {"sequence": 2 * sizes["sequence"]}), precision) > 2 * none
    assert activations(Workload(**sizes), precision, tp=2) == -(-none // 2)


class Net(nn.Module):
    """Tied, uneven, with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_B: torch.Tensor) -> torch.Tensor:
        hidden_BD = self.tokens(tokens_B)
        for block in self.blocks:
            hidden_BD = block(hidden_BD)
        return self.head(hidden_BD)


def measured(model: nn.Module) -> Held:
    """After a step whose gradients are still there. Storages, since a shard's may be longer than the shard."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()

    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    moments = [local(state[name]) for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    stored = sum(local(parameter).untyped_storage().nbytes() for parameter in model.parameters())
    reduced = {
        storage.data_ptr(): storage.nbytes()
        for storage in (local(parameter.grad).untyped_storage() for parameter in model.parameters())
    }
    return Held(stored, sum(reduced.values()), sum(moment.nbytes for moment in moments))


def with_fsdp2() -> Held:
    model = Net()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return measured(fully_shard(model, mesh=mesh))


def test_one_process_holds_that():
    with torch.device("meta"):
        shapes = shapes_of(Net())
    assert sum(map(math.prod, shapes.values())) == 50 * 7 + 3 * 56
    assert measured(Net()) == held(shapes, Layout(), Training())


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp2_holds_that(ranks, size):
    assert ranks(size, with_fsdp2) == by_rank(shapes_of(Net()), Layout(dp=size), Training(stage=3))
