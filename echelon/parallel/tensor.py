"""Tensor parallelism: a model's matrices, split over the ranks of one dimension, by the names of its parts.

`qkv`, `up` and `gate` are split by their outputs, `out` and `down` by their inputs, so that a rank computes whole heads
and its own slice of the MLP, and what `out` and `down` give are shares of a sum. Between them, in the norms and the
residual stream, the sequence is split: the stream is gathered on its way into an attention or MLP, and the sum is
scattered on its way out. The vocabulary is split in the embedding and in the head with its loss. Parameters become
DTensors, in PyTorch's own styles where it has them; a norm's gradient is then a share of a sum (Partial), which the
data strategies complete.

A model whose sequence cannot be split (a vision transformer with its class token) keeps the stream whole on all ranks
(`sequence_parallel=False`): all-reduces instead of gathers and scatters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from echelon.parallel.loss import chunked_cross_entropy

_BY_OUTPUT = ("qkv", "up", "gate", "tokens", "head")
_BY_INPUT = ("out", "down")
_TABLES = {"positions": 0, "segments": 1}  # embeddings that stay whole, and where the sequence is in their input


def split(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> nn.Module:
    """Split `model` over `mesh` (one dimension), in place."""
    if mesh.size() == 1:
        return model
    check(model, mesh.size())
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    tied = _tied(model)
    for name, module in list(model.named_modules()):
        last = name.rpartition(".")[2]
        if last == "attention" and kv_heads_of(module) < mesh.size():
            _share_keys(module, mesh)
        style = _style(last, module, stream)
        if style is not None:
            parallelize_module(module, mesh, style, src_data_rank=None)
    for one, other in tied:
        model.get_submodule(other).weight = model.get_submodule(one).weight
    if sequence_parallel:
        if hasattr(model, "tokens"):
            model.get_submodule("tokens").register_forward_pre_hook(partial(_check_tokens, mesh.size()), prepend=True)
        place: Any = getattr(model, "place", None)
        if place is not None:
            place.part = (mesh.get_local_rank(), mesh.size())
    return model


def split_dimension(name: str, kv_heads: int, ranks: int) -> int | None:
    """Along which of its dimensions the parameter `name` is split over `ranks`; None if each holds all of it."""
    *_, module, kind = ("", *name.split("."))
    if module == "qkv" and kv_heads < ranks:
        return None
    if module in _BY_OUTPUT:
        return 0
    return 1 if module in _BY_INPUT and kind == "weight" else None


def shares_gradient(name: str, kv_heads: int, ranks: int, sequence_parallel: bool = True) -> bool:
    """Whether a rank's gradient of the parameter `name` is only a share, which is summed over `ranks` once a step."""
    *_, module, _ = ("", *name.split("."))
    if module == "qkv":
        return kv_heads < ranks
    if module in ("q_norm", "k_norm"):
        return True
    return sequence_parallel and (module in (*_TABLES, "dense") or module.endswith("norm"))


def traffic(
    blocks: int,
    batch: int,
    sequence: int,
    hidden: int,
    ranks: int,
    element_size: int,
    sequence_parallel: bool = True,
    *,
    embeds: bool = True,
    ends: bool = True,
) -> dict[str, int]:
    """Payload bytes by operation, over `ranks`, of one forward and backward pass through so many blocks, the embedding
    (`embeds`) and the head (`ends`).

    Each attention and MLP gathers the stream and scatters a sum, forward, and the other way round, backward; so do the
    embedding (which only scatters) and the head (which only gathers). A whole stream is all-reduced instead, and has no
    embedding. `batch` and `sequence` are a rank's; `sequence` is 1 for the head of a model that classifies. The shares
    of gradients (`shares_gradient`) and the loss (`loss.traffic`) come on top.
    """
    if ranks == 1:
        return {}
    stream = batch * sequence * hidden * element_size
    if sequence_parallel:
        times = 4 * blocks + embeds + ends
        return {"all_gather_single": times * stream, "reduce_scatter_single": times * stream}
    return {"all_reduce": 4 * blocks * stream + ends * batch * hidden * element_size}


def _style(last: str, module: nn.Module, stream: Placement) -> ParallelStyle | None:
    if last in ("attention", "mlp"):
        return _Gathered(stream)
    if last == "qkv" and isinstance(module.weight, DTensor):  # shared keys: done already
        return None
    if last in ("qkv", "up", "gate"):
        return ColwiseParallel(input_layouts=Replicate())
    if last in _BY_INPUT:
        return RowwiseParallel(output_layouts=stream)
    if last == "tokens":
        return _Embedding(stream)
    if last in _TABLES:
        return _Along(Shard(_TABLES[last]) if isinstance(stream, Shard) else stream, whole_input=True)
    if last in ("q_norm", "k_norm"):
        return _Along(Shard(1))  # by heads
    if last.endswith("norm") or last == "dense":
        return _Along(stream)
    return _Vocabulary(stream) if last == "head" else None


class _Gathered(ParallelStyle):
    """The module's first argument comes as each rank's part of the stream and goes in whole."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return _whole(arguments[0], mesh, self._stream), *arguments[1:]

        module.register_forward_pre_hook(gather)
        return module


class _Along(ParallelStyle):
    """The module works on whatever part of its input a rank has; its parameters are whole on all ranks."""

    def __init__(self, placement: Placement, whole_input: bool = False) -> None:
        self._placement, self._whole_input = placement, whole_input

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _distribute(module, mesh, Replicate())

        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            given = Replicate() if self._whole_input else self._placement
            part = DTensor.from_local(arguments[0], mesh, [given], run_check=False)
            return part.redistribute(mesh, [self._placement]), *arguments[1:]

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda _, __, output: output.to_local())
        return module


class _Embedding(ParallelStyle):
    """A vocabulary that is split. (PyTorch's own style makes the gradient of all its rows on every rank.)"""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _distribute(module, mesh, Shard(0))
        tokens: Any = module

        def forward(tokens_BS: Tensor) -> Tensor:
            weight, first = tokens.weight.to_local(), _first_row(tokens.weight, mesh)
            places_BS = tokens_BS - first
            here_BS = (places_BS >= 0) & (places_BS < len(weight))
            share_BSD = F.embedding(places_BS.where(here_BS, 0), weight) * here_BS.unsqueeze(-1)
            sum_BSD: Any = DTensor.from_local(share_BSD, mesh, [Partial()], run_check=False)
            stream_BSD: Tensor = sum_BSD.redistribute(mesh, [self._stream]).to_local()
            return stream_BSD

        tokens.forward = forward
        return module


class _Vocabulary(ParallelStyle):
    """A head whose classes are split, with its loss."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _distribute(module, mesh, Shard(0))
        head: Any = module
        head.loss = partial(self._loss, mesh)
        head.project = partial(self._project, mesh)
        return module

    def _loss(
        self, mesh: DeviceMesh, hidden: Tensor, weight: Any, bias: Any, targets: Tensor, chunk: int = 1024
    ) -> Tensor:
        whole = _whole(hidden, mesh, self._stream).to_local(grad_placements=[Partial()])
        first = _first_row(weight, mesh)
        local_bias = None if bias is None else bias.to_local()
        part = partial(chunked_cross_entropy, chunk=chunk, group=mesh.get_group(), first=first)
        return part(whole, weight.to_local(), local_bias, targets)

    def _project(self, mesh: DeviceMesh, hidden: Tensor, weight: Any, bias: Any) -> Tensor:
        logits: Any = F.linear(_whole(hidden, mesh, self._stream), weight, bias)
        whole: Tensor = logits.redistribute(mesh, [Replicate()]).to_local()
        return whole


def _share_keys(attention: Any, mesh: DeviceMesh) -> None:
    """Fewer kv heads than ranks: several ranks share a kv head, each with some of its q heads.

    `qkv` stays whole on all ranks, and each multiplies with the rows it needs; its gradient is a share of a sum.
    """
    qkv, rows_of_a_key = attention.qkv, attention.qkv.weight.shape[0] // kv_heads_of(attention)
    sharing = mesh.size() // kv_heads_of(attention)
    head, place = divmod(mesh.get_local_rank(), sharing)
    rows = head * rows_of_a_key + rows_of_sharer(attention, place, sharing)
    _distribute(qkv, mesh, Replicate())
    attention.queries_per_key //= sharing

    def of(parameter: Any) -> Tensor:
        local: Tensor = parameter.to_local(grad_placements=[Partial()])
        return local[rows.to(local.device)]

    def forward(input: Any) -> Tensor:
        bias = None if qkv.bias is None else of(qkv.bias)
        return F.linear(input.to_local(grad_placements=[Partial()]), of(qkv.weight), bias)

    qkv.forward = forward


def rows_of_sharer(attention: Any, place: int, sharing: int) -> Tensor:
    """Which of a kv head's rows in `qkv` one of its `sharing` ranks needs: its own queries, the key, the value."""
    queries, width = int(attention.queries_per_key), int(attention.head_dim)
    mine = queries // sharing
    heads = torch.tensor([*range(place * mine, (place + 1) * mine), queries, queries + 1])
    return (heads[:, None] * width + torch.arange(width)).flatten()


def _first_row(weight: Any, mesh: DeviceMesh) -> int:
    """Of this rank's: DTensor cuts into equal parts, rounded up, until nothing is left."""
    return mesh.get_local_rank() * -(-int(weight.shape[0]) // mesh.size())


def _whole(local: Tensor, mesh: DeviceMesh, stream: Placement) -> Any:
    return DTensor.from_local(local, mesh, [stream], run_check=False).redistribute(mesh, [Replicate()])


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))


def kv_heads_of(attention: Any) -> int:
    """How many an attention has; of one that is split, this rank."""
    return int(attention.qkv.weight.shape[0] // attention.head_dim // (attention.queries_per_key + 2))


def _tied(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of modules that hold the same weight."""
    seen: dict[int, str] = {}
    pairs = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and seen.setdefault(id(weight), name) != name:
            pairs.append((seen[id(weight)], name))
    return pairs


def check(model: nn.Module, ranks: int) -> None:
    """Whether so many ranks can train a model that they split; the error names what they cannot."""
    for name, module in model.named_modules():
        dropped: Any = module.dropout if name.endswith("attention") else 0
        if dropped:
            raise ValueError(
                f"attention dropout ({dropped}) is not possible with tensor parallelism: ranks hold different "
                "heads, and what is dropped would depend on the layout. Set attention_dropout to 0, or tp to 1"
            )
    check_shapes(model, ranks)


def check_shapes(model: nn.Module, ranks: int) -> None:
    """Whether so many ranks can split a model; the error names what they cannot."""
    problems: list[str] = []

    def want(good: bool, problem: str) -> None:
        if not good and problem not in problems:
            problems.append(problem)

    for name, module in model.named_modules():
        part: Any = module
        last = name.rpartition(".")[2]
        if last == "attention":
            keys = kv_heads_of(part)
            queries = keys * part.queries_per_key
            want(queries % ranks == 0, f"{queries} heads")
            want(keys % ranks == 0 or ranks % keys == 0, f"{keys} kv heads")
        if last in ("tokens", "head") and -(-part.weight.shape[0] // ranks) * (ranks - 1) >= part.weight.shape[0]:
            want(False, f"a vocabulary of {part.weight.shape[0]}, too small for so many ranks")
        if last in ("up", "gate"):
            want(part.out_features % ranks == 0, f"an MLP of {part.out_features}")
    if problems:
        raise ValueError(f"tp={ranks} cannot split {', '.join(problems)}: choose tp so that it divides them")


def _check_tokens(ranks: int, tokens: Any, arguments: tuple[Any, ...]) -> None:
    length = arguments[0].shape[1]
    vocabulary = tokens.weight.shape[0]
    if arguments[0].is_cpu and not 0 <= int(arguments[0].min()) <= int(arguments[0].max()) < vocabulary:
        raise IndexError(f"a token is not one of the vocabulary's {vocabulary}")
    if length % ranks:
        raise ValueError(
            f"a sequence of {length} tokens cannot be split over tp={ranks}: use a length that {ranks} divides"
        )
