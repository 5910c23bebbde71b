"""An attention with the seam that strategies look for, alone, and scattered over ranks to compare with one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.parallel import sequence

EXACT = 1e-9


def attend(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    causal: bool,
    mask_BS: Tensor | None = None,
    positions_S: Tensor | None = None,
) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=causal, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, head_dim: int, causal: bool) -> None:
        super().__init__()
        self.causal, self.head_dim, self.queries_per_key = causal, head_dim, heads // kv_heads
        self.qkv = nn.Linear(heads * head_dim, (heads + 2 * kv_heads) * head_dim)
        self.out = nn.Linear(heads * head_dim, heads * head_dim)
        self.attend, self.dropout = attend, 0.0

    def forward(self, x_BSD: Tensor, positions_S: Tensor | None, mask_BS: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x_BSD).unflatten(2, (-1, self.queries_per_key + 2, self.head_dim))
        q, k, v = qkv.split([self.queries_per_key, 1, 1], dim=3)
        q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))
        out_BHSD = self.attend(q, k, v, causal=self.causal, mask_BS=mask_BS, positions_S=positions_S)
        return self.out(out_BHSD.transpose(1, 2).flatten(2))


def world(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


def qkv(shape: dict[str, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, for the whole sequence."""
    generator = torch.Generator().manual_seed(7)
    heads = shape["heads"], shape["kv_heads"], shape["kv_heads"], shape["heads"]
    sizes = [(shape["batch"], count, shape["length"], shape["head_dim"]) for count in heads]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def one_process(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> list[Tensor]:
    """Output and gradients of q, k and v, in fp64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, causal=causal)
    out.backward(grad.double())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def scattered_attention(mesh: DeviceMesh, kind: str, whole: list[Tensor], causal: bool) -> list[Tensor]:
    """This rank's part of the same."""
    attention = Attention(1, 1, 1, causal)
    sequence.scatter(attention, mesh, kind=kind)
    *parts, positions_S = sequence.part(*(x.transpose(1, 2) for x in whole), mesh=mesh, kind=kind, causal=causal)
    q, k, v, grad = (x.transpose(1, 2) for x in parts)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention.attend(*leaves, causal=causal, positions_S=positions_S)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def attention_errors(
    kind: str, shape: dict[str, int], causal: bool, dtype: torch.dtype, device: str = "cpu"
) -> list[float]:
    """Relative errors of this rank's output and gradients."""
    mesh = world(device)
    whole = [x.to(device) for x in qkv(shape, dtype)]
    got = scattered_attention(mesh, kind, whole, causal)
    assert all(x.dtype == dtype for x in got)
    held = sequence.positions(kind, causal, shape["length"], mesh.size(), mesh.get_local_rank(), whole[0].device)
    return [error(x, y[:, :, held]) for x, y in zip(got, one_process(*whole, causal), strict=True)]


def shape(heads: tuple[int, int], length: int = 24, batch: int = 2, head_dim: int = 8) -> dict[str, int]:
    return {"batch": batch, "length": length, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
