"""A scattered sequence equals one process: outputs, losses and every gradient; and sends exactly what it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import echelon.comm
from echelon.parallel import ring, sequence
from tests.parallel.attention import EXACT, Attention, attention_errors, error, one_process, qkv, shape, world

KINDS = ("ulysses", "ring")
HEADS = {"as many": (4, 4), "two groups": (4, 2), "one group": (4, 1), "neither divides": (12, 3)}


class Block(nn.Module):
    def __init__(self, dim: int, attention: Attention) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x_BSD: Tensor, positions_S: Tensor | None) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), positions_S)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Transformer(nn.Module):
    """A small plain one with learned positions; its loss is the sum over the targets."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, causal: bool, length: int, recompute: bool) -> None:
        super().__init__()
        dim = heads * head_dim
        self.recompute = recompute
        self.tokens, self.positions = nn.Embedding(50, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, Attention(heads, kv_heads, head_dim, causal)) for _ in range(2))
        self.head = nn.Linear(dim, 50)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, positions_S: Tensor | None = None) -> Tensor:
        x_BSD = self.tokens(tokens_BS)
        x_BSD = x_BSD + self.positions(torch.arange(x_BSD.shape[1]) if positions_S is None else positions_S)
        for block in self.blocks:
            if self.recompute:
                x_BSD = checkpoint(block, x_BSD, positions_S, use_reentrant=False)
            else:
                x_BSD = block(x_BSD, positions_S)
        return F.cross_entropy(self.head(x_BSD).flatten(0, 1), targets_BS.flatten(), reduction="sum")


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4])
def test_attention_equals_one_process(ranks: Any, n: int, kind: str, causal: bool, heads: tuple[int, int]) -> None:
    for errors in ranks(n, attention_errors, kind, shape(heads), causal, torch.float64):
        assert max(errors) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_eight_ranks(ranks: Any, kind: str) -> None:
    for errors in ranks(8, attention_errors, kind, shape((8, 2), length=48), True, torch.float64):
        assert max(errors) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_lower_precisions_stay_within_their_rounding(
    ranks: Any, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    for errors in ranks(4, attention_errors, kind, shape((4, 2), length=64, head_dim=16), True, dtype):
        assert max(errors) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data())
def test_attention_of_any_shape(ranks: Any, kind: str, data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([2, 4] if kind == "ulysses" else [2, 3, 4]), label="ranks")
    kv_heads = data.draw(st.integers(1, 3), label="kv heads")
    queries = data.draw(st.integers(1, 3), label="queries a key")
    heads = kv_heads * queries * (n if kind == "ulysses" else 1)
    sizes = {
        "batch": data.draw(st.integers(1, 3), label="batch"),
        "length": 2 * n * data.draw(st.integers(1, 4), label="length of a chunk"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": data.draw(st.integers(1, 9), label="head_dim"),
    }
    causal = data.draw(st.booleans(), label="causal")
    for errors in ranks(n, attention_errors, kind, sizes, causal, torch.float64):
        assert max(errors) < EXACT


def transformer_errors(
    kind: str, heads: tuple[int, int], causal: bool, recompute: bool, compiled: bool = False
) -> dict[str, float]:
    """Relative errors of the loss and of each parameter's gradient, both summed over the ranks."""
    mesh, length = world(), 16
    tokens_BS, targets_BS = torch.randint(0, 50, (2, 2, length))
    targets_BS[0, 3:6] = -100
    torch.manual_seed(1)
    model = Transformer(*heads, 4, causal, length, recompute).double()
    expected_loss = model(tokens_BS, targets_BS)
    expected_loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    names = set(model.state_dict())

    sequence.scatter(model, mesh, kind=kind)
    assert set(model.state_dict()) == names
    if compiled:
        model.compile(backend="aot_eager")
    tokens, targets, positions_S = sequence.part(tokens_BS, targets_BS, mesh=mesh, kind=kind, causal=causal)
    loss = model(tokens, targets, positions_S=positions_S)
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    errors = {"loss": error(loss, expected_loss.detach())}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        errors[name] = error(parameter.grad, expected[name])
    return errors


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4])
def test_a_transformer_equals_one_process(ranks: Any, n: int, kind: str, causal: bool, recompute: bool) -> None:
    for errors in ranks(n, transformer_errors, kind, (4, 2), causal, recompute):
        assert {name: value for name, value in errors.items() if value > EXACT} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_transformer_equals_one_process(ranks: Any, kind: str) -> None:
    for errors in ranks(2, transformer_errors, kind, (4, 2), True, False, True, timeout=180):
        assert {name: value for name, value in errors.items() if value > EXACT} == {}


def every_split_attention_error() -> list[float]:
    """With the heads split over two ranks and the sequence over two, by either kind over the same mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    return [value for kind in KINDS for value in split_attention_errors(kind, mesh)]


def split_attention_errors(kind: str, mesh: DeviceMesh) -> list[float]:
    """Of the output and the gradient of the input."""
    x_BSD = torch.randn(2, 16, 32, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    attention = Attention(8, 4, 4, True).double()
    expected = attention(x_BSD, None)
    (expected**2).sum().backward()

    styles = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
    sequence.scatter(parallelize_module(attention, mesh["tp"], styles), mesh["cp"], kind=kind)
    part_BSD, positions_S = sequence.part(x_BSD.detach(), mesh=mesh["cp"], kind=kind)
    got = attention(part_BSD.requires_grad_(), positions_S)
    (got**2).sum().backward()
    pairs = (got, expected[:, positions_S]), (part_BSD.grad, x_BSD.grad[:, positions_S])
    return [error(x.detach(), y.detach()) for x, y in pairs]


def test_heads_may_be_split_before(ranks: Any) -> None:
    for errors in ranks(4, every_split_attention_error):
        assert max(errors) < EXACT


def under_autocast(kind: str) -> tuple[torch.dtype, float]:
    """The dtype of the output where q and k are fp32 and v is bf16, and its error."""
    mesh = world()
    whole = qkv(shape((4, 2)), torch.float32)
    attention = sequence.scatter(Attention(1, 1, 1, True), mesh, kind=kind)
    *parts, positions_S = sequence.part(*(x.transpose(1, 2) for x in whole), mesh=mesh, kind=kind)
    q, k, v, _ = (x.transpose(1, 2) for x in parts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention.attend(q, k, v.bfloat16(), causal=True, positions_S=positions_S)
    return out.dtype, error(out, one_process(*whole, True)[0][:, :, positions_S])


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_reaches_attention(ranks: Any, kind: str) -> None:
    for dtype, difference in ranks(2, under_autocast, kind):
        assert dtype == torch.bfloat16
        assert difference < 1e-2


def recorded(kind: str, heads: tuple[int, int], dtype: torch.dtype) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Payload bytes by operation, and calls by operation, forward and backward."""
    mesh = world()
    whole = qkv(shape(heads), dtype)
    attention = sequence.scatter(Attention(1, 1, 1, True), mesh, kind=kind)
    *parts, positions_S = sequence.part(*(x.transpose(1, 2) for x in whole), mesh=mesh, kind=kind)
    q, k, v, grad = (x.transpose(1, 2).requires_grad_() for x in parts)
    with echelon.comm.record() as forward:
        out = attention.attend(q, k, v, causal=True, positions_S=positions_S)
    with echelon.comm.record() as backward:
        out.backward(grad)
    bytes_sent, calls = [Counter[str](), Counter[str]()], [Counter[str](), Counter[str]()]
    for log, sent, made in zip((forward, backward), bytes_sent, calls, strict=True):
        for record in log:
            assert record.dimension == "cp"
            if record.operation != "receive":
                sent[record.operation] += record.payload
                made[record.operation] += 1
    return bytes_sent, calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_what_is_said(
    ranks: Any, n: int, kind: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    sizes = shape(heads)
    said = sequence.traffic(
        kind, sizes["batch"], sizes["length"], *heads, sizes["head_dim"], ranks=n, element_size=dtype.itemsize
    )
    operation, calls = ("all_to_all_single", (2, 2)) if kind == "ulysses" else ("send", (n - 1, 2 * (n - 1)))
    for sent, made in ranks(n, recorded, kind, heads, dtype):
        assert [dict(counter) for counter in sent] == list(said)
        assert [dict(counter) for counter in made] == [{operation: count} for count in calls]


def test_traffic_is_what_the_field_says() -> None:
    batch, length, heads, head_dim, n, size = 3, 64, 8, 16, 4, 2
    hidden = batch * length * heads * head_dim * size
    forward, backward = sequence.traffic("ulysses", batch, length, heads, heads, head_dim, n, size)
    assert forward == backward == {"all_to_all_single": 4 * hidden // n}
    forward, backward = sequence.traffic("ring", batch, length, heads, 2, head_dim, n, size)
    assert forward == {"send": 2 * (hidden // 4) * (n - 1) // n}
    assert backward == {"send": 3 * forward["send"]}
    assert sequence.traffic("ring", batch, length, heads, 2, head_dim, 1, size) == ({}, {})


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_order_holds_every_position_once(kind: str, causal: bool, n: int) -> None:
    held = [sequence.positions(kind, causal, 4 * n, n, rank, torch.device("cpu")) for rank in range(n)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(4 * n))
    assert all(torch.equal(part, part.sort().values) for part in held)


def test_a_causal_ring_holds_an_early_and_a_late_chunk() -> None:
    assert sequence.order("ring", True, 3) == ((0, 5), (1, 4), (2, 3))
    assert sequence.order("ring", False, 3) == sequence.order("ulysses", True, 3) == ((0,), (1,), (2,))
    assert ring.visible(((0, 3), (1, 2)), 0, 1, 8, True) == (slice(4, 8), slice(0, 8), False)
    assert ring.visible(((0, 3), (1, 2)), 1, 0, 8, True) == (slice(0, 8), slice(0, 4), False)
    assert ring.visible(((0,), (1,)), 0, 1, 8, True) is None


def refusals() -> dict[str, str]:
    """What is refused, with what is said."""
    mesh = world()
    tokens_BS = torch.zeros(1, 8, dtype=torch.long)
    said = {}

    def refused(name: str, function: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=r".") as caught:
            function(*arguments, **options)
        said[name] = str(caught.value)

    refused("length", sequence.part, tokens_BS[:, :6], mesh=mesh, kind="ring")
    refused("length, not causal", sequence.part, tokens_BS[:, :7], mesh=mesh, kind="ring", causal=False)
    refused("lengths", sequence.part, tokens_BS, tokens_BS[:, :4], mesh=mesh, kind="ring")
    refused("kind", sequence.scatter, Attention(2, 2, 4, True), mesh, kind="star")
    refused("no attention", sequence.scatter, nn.Linear(2, 2), mesh)
    dropping = Transformer(2, 2, 4, True, 8, False)
    dropping.blocks[1].attention.dropout = 0.1
    refused("dropout", sequence.scatter, dropping, mesh)

    attention = sequence.scatter(Attention(2, 2, 4, True), mesh, kind="ring")
    x_BSD = torch.zeros(1, 4, 8)
    _, positions_S = sequence.part(tokens_BS, mesh=mesh, kind="ring")
    refused("mask", attention, x_BSD, positions_S, torch.ones(1, 4, dtype=torch.bool))
    refused("no positions", attention, x_BSD, None)
    refused("contiguous positions", attention, x_BSD, torch.arange(4) + 4 * mesh.get_local_rank())
    odd = sequence.scatter(Attention(3, 3, 4, True), mesh, kind="ulysses")
    _, positions_S = sequence.part(tokens_BS, mesh=mesh, kind="ulysses")
    refused("heads", odd, torch.zeros(1, 4, 12), positions_S)
    return said


def test_what_cannot_be_right_is_refused(ranks: Any) -> None:
    said = ranks(2, refusals)[0]
    assert "multiple of 4" in said["length"]
    assert "multiple of 2" in said["length, not causal"]
    assert "[4, 8]" in said["lengths"]
    assert "ulysses, ring" in said["kind"]
    assert "`attend`" in said["no attention"]
    assert "blocks.1.attention has dropout=0.1" in said["dropout"]
    assert "padding mask" in said["mask"]
    assert "no positions_S" in said["no positions"]
    assert "not those" in said["contiguous positions"]
    assert "kind='ring'" in said["heads"]
