"""Sequence parallelism: each rank holds a part of every sequence, and only attention looks beyond it.

`scatter` finds the model's attentions by their seam, the attribute `attend`, and puts another function there; `part`
gives each rank its part of a batch, with the positions of its tokens. Two kinds:

- `ulysses` parts the heads while it attends (`ulysses.py`): two all-to-alls forward and two backward; the degree must
  divide the query heads;
- `ring` passes keys and values around (`ring.py`): messages that overlap with computing; any number of heads.

`traffic` says exactly what either sends. Neither takes attention dropout or padding masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from echelon.parallel import ring, ulysses

Kind = Literal["ulysses", "ring"]


def order(kind: Kind, causal: bool, ranks: int) -> ring.Order:
    """Which chunks of the sequence each rank holds.

    One run each; but the ring of a causal model gives rank r the chunks r and 2P-1-r of 2P, an early one and a late
    one, so that all ranks have equally much to compute.
    """
    if kind not in get_args(Kind):
        raise ValueError(
            f"kind={kind!r} is not a kind of sequence parallelism: choose one of {', '.join(get_args(Kind))}"
        )
    if kind == "ring" and causal:
        return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return tuple((rank,) for rank in range(ranks))


def positions(kind: Kind, causal: bool, length: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """The positions that a rank holds of a sequence of `length`."""
    chunks = order(kind, causal, ranks)
    count = sum(map(len, chunks))
    if length % count:
        raise ValueError(
            f"sequences of {length} tokens do not divide into {count} equal chunks, which {kind} over {ranks} ranks "
            f"needs{' for a causal model' if count > ranks else ''}: choose a length that is a multiple of {count}"
        )
    return _positions(chunks[rank], length // count, device)


@functools.lru_cache(maxsize=64)
def _positions(chunks: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Made once: whoever compares what it was given with what it expects mostly finds the same object."""
    with torch.inference_mode(False):
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks]).to(device)


def part(*tensors_BS: Tensor, mesh: DeviceMesh, kind: Kind, causal: bool = True) -> tuple[Tensor, ...]:
    """This rank's part of tensors that every rank of the mesh holds whole, then the positions to give to the model.

    `tokens, targets, positions_S = part(tokens, targets, mesh=mesh, kind="ring")`, and then
    `model(tokens, targets, positions_S=positions_S)`. `causal` is whether the model's attention is.
    """
    lengths = {tensor.shape[1] for tensor in tensors_BS}
    if len(lengths) != 1:
        raise ValueError(f"part needs tensors of one length of sequence, and got {sorted(lengths) or 'no tensor'}")
    place = kind, causal, lengths.pop(), mesh.size(), mesh.get_local_rank()
    positions_S = positions(*place, tensors_BS[0].device)
    return *(tensor[:, positions(*place, tensor.device)] for tensor in tensors_BS), positions_S


def scatter(model: nn.Module, mesh: DeviceMesh, kind: Kind = "ring") -> nn.Module:
    """Let every attention of the model look at the whole sequence, of which each rank of the mesh holds its `part`."""
    order(kind, True, mesh.size())
    if mesh.ndim != 1:
        raise ValueError(f"sequence.scatter needs a mesh of one dimension, and this has {mesh.ndim}")
    attentions = {name: module for name, module in model.named_modules() if hasattr(module, "attend")}
    if not attentions:
        raise ValueError(
            f"sequence.scatter found no attention in {type(model).__name__}: it looks for modules whose attribute "
            "`attend` is a function of q, k and v"
        )
    for name, attention in attentions.items():
        if getattr(attention, "dropout", 0) > 0:
            raise ValueError(
                f"sequence.scatter cannot drop attention weights, and {name or 'the model'} has dropout="
                f"{attention.dropout}: set the attention's dropout to 0 (dropout elsewhere is no hindrance)"
            )
    if mesh.size() > 1:
        for attention in attentions.values():
            inner = functools.partial(_attend, kind=kind, inner=attention.attend, group=mesh.get_group())
            attention.attend = torch.compiler.disable(inner)  # type: ignore[assignment]
    return model


def _attend(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    causal: bool,
    mask_BS: Tensor | None = None,
    positions_S: Tensor | None = None,
    kind: Kind,
    inner: Callable[..., Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    if mask_BS is not None:
        raise ValueError(
            "attention over a scattered sequence takes no padding mask: pack sequences to full length, or pad at "
            "the end and give the padding targets of -100 (a causal model never looks at it)"
        )
    _check_positions(positions_S, kind, causal, q_BHSD.shape[2] * group.size(), group)
    device = q_BHSD.device.type
    if torch.is_autocast_enabled(device):  # as PyTorch's own attention does
        q_BHSD, k_BGSD, v_BGSD = (x.to(torch.get_autocast_dtype(device)) for x in (q_BHSD, k_BGSD, v_BGSD))
    with torch.autocast(device, enabled=False):
        if kind == "ulysses":
            return ulysses.attention(q_BHSD, k_BGSD, v_BGSD, causal=causal, inner=inner, group=group)
        chunks = order(kind, causal, group.size())
        return ring.attention(q_BHSD, k_BGSD, v_BGSD, causal=causal, order=chunks, group=group)


def _check_positions(given_S: Tensor | None, kind: Kind, causal: bool, length: int, group: dist.ProcessGroup) -> None:
    """A model that was not told its positions, or other ones, would compute something else without a word."""
    what = f"{kind} over {group.size()} ranks, {'' if causal else 'not '}causal"
    if given_S is None:
        raise ValueError(f"the model was given no positions_S: pass what sequence.part returned ({what})")
    expected_S = positions(kind, causal, length, group.size(), group.rank(), given_S.device)
    if given_S is not expected_S and not torch.equal(given_S, expected_S):
        raise ValueError(
            f"positions_S are not those of this rank's part of the sequence ({what}): pass what sequence.part returned "
            "for this kind and this model"
        )


def traffic(
    kind: Kind,
    batch: int,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ranks: int,
    element_size: int,
) -> tuple[dict[str, int], dict[str, int]]:
    """Payload bytes by operation that a rank sends for one attention: forward, and backward.

    `sequence` is the whole length and `heads` and `kv_heads` those on a rank. With s = sequence / ranks and ulysses'
    g = lcm(kv_heads, ranks), which is kv_heads where ranks divide them:

    - ulysses, forward: an all-to-all of batch·s·(heads + 2g)·head_dim elements (q, k, v) and one of
      batch·s·heads·head_dim (the output); backward the same two, the other way round;
    - ring, forward: ranks - 1 messages of 2·batch·s·kv_heads·head_dim elements (k, v); backward the same, and as many
      of their gradients, which are summed on their way in fp32 where the elements are smaller.

    Recomputation in the backward pass sends the forward's again.
    """
    if ranks == 1:
        return {}, {}
    positions = batch * (sequence // ranks) * head_dim
    if kind == "ulysses":
        elements = positions * (2 * heads + 2 * ulysses.exchanged_kv_heads(kv_heads, ranks))
        return {"all_to_all_single": elements * element_size}, {"all_to_all_single": elements * element_size}
    elements = 2 * positions * kv_heads * (ranks - 1)
    return {"send": elements * element_size}, {"send": elements * (element_size + max(element_size, 4))}
