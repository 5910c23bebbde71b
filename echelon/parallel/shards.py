"""Tensor parallelism for inference: after `load` or `shard` a rank holds plain tensors, its own parts of the weights.

`parallel/tensor.py` splits for training, where DTensors carry placements and gradients; a step of inference is short,
and what they cost on the host is most of it. Here a forward pass is the model's own, on fewer heads and a narrower MLP,
and the ranks meet in one all-reduce after each `out` and `down`, one after the embedding, and one gather of the logits.
DTensors serve only while the weights are filled: by them each rank knows which slices to read.

For inference alone: what is returned is in eval mode and knows no gradients. All ranks must be given the same tokens in
the same order. A token beyond the vocabulary is a row of zeros here and no error: whoever takes tokens checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from echelon.parallel.loss import chunked_cross_entropy
from echelon.parallel.tensor import check_shapes, kv_heads_of, rows_of_sharer, split_dimension

ModelType = TypeVar("ModelType", bound=nn.Module)


def load(
    model: ModelType,
    group: dist.ProcessGroup | None,
    fill: Callable[[ModelType], None],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> ModelType:
    """Give a model on the meta device memory for this rank's parts alone, and let `fill` fill them.

    `fill` is given the model with parameters that are plain tensors or DTensors, as `hub.load_into` and
    `model.initialize` take them. Without a group this process holds all.
    """
    device = torch.device(device)
    split = _split(model if dtype is None else model.to(dtype), group, device.type)
    split.to_empty(device=device)
    fill(split)
    return _localize(split, group)


def shard(model: ModelType, group: dist.ProcessGroup | None) -> ModelType:
    """The same for a model that each rank holds whole: each keeps its parts."""
    return _localize(_split(model, group, next(model.parameters()).device.type), group)


class Meeting:
    """Where the ranks of a split model meet, in every exchange of a forward pass."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._instead: Callable[[Callable[[], object]], object] | None = None

    @contextmanager
    def around(self, instead: Callable[[Callable[[], object]], object]) -> Iterator[None]:
        """Give every exchange to `instead`, which does it: whoever captures what is computed cannot capture that."""
        self._instead = instead
        try:
            yield
        finally:
            self._instead = None

    def sum(self, tensor: Tensor) -> None:
        """Over the ranks, in place."""
        self._exchange(partial(dist.all_reduce, tensor, group=self.group))

    def gather(self, tensor: Tensor, parts: list[Tensor] | None) -> None:
        """To the first rank."""
        self._exchange(partial(dist.gather, tensor, parts, group=self.group, group_dst=0))

    def _exchange(self, call: Callable[[], object]) -> None:
        if self._instead is None:
            call()
        else:
            self._instead(call)


def meeting_of(model: nn.Module) -> Meeting | None:
    """None if this process holds all of the model."""
    found: Meeting | None = getattr(model, "meeting", None)
    return found


def traffic(
    blocks: int, tokens: int, hidden: int, vocabulary: int, ranks: int, element_size: int, rows: int | None = None
) -> dict[str, tuple[int, int]]:
    """Calls and payload bytes by operation of one forward pass of `tokens` tokens, `rows` of which get logits (all).

    Two all-reduces of the stream a block and one for the embedding; one gather of the logits, to the first rank, of as
    many from each: the vocabulary's last part may be shorter, and is filled up.
    """
    if ranks == 1:
        return {}
    logits = (tokens if rows is None else rows) * -(-vocabulary // ranks) * ranks
    sums = 2 * blocks + 1
    return {"all_reduce": (sums, sums * tokens * hidden * element_size), "gather": (1, logits * element_size)}


def _split(model: ModelType, group: dist.ProcessGroup | None, device: str) -> ModelType:
    """Make DTensors of all parameters that are not whole on each rank."""
    if group is None or group.size() == 1:
        return model
    check_shapes(model, group.size())
    mesh = DeviceMesh.from_group(group, device)
    made: dict[int, nn.Parameter] = {}  # a tied weight is one parameter
    for name, module in model.named_modules():
        if name.endswith("attention"):
            _split_heads(module, group, device)
        elif not name.endswith("qkv"):
            for kind, parameter in list(module.named_parameters(recurse=False)):
                dimension = split_dimension(f"{name}.{kind}", group.size(), group.size())
                if dimension is not None and id(parameter) not in made:
                    made[id(parameter)] = _distributed(parameter, mesh, Shard(dimension))
                setattr(module, kind, made.get(id(parameter), parameter))
    return model


def _split_heads(attention: Any, group: dist.ProcessGroup, device: str) -> None:
    """By kv heads. Where there are fewer than ranks, several share one: each reads all its rows, and keeps some later.

    The mesh only tells who holds what; nothing is sent over it.
    """
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, _sharing(attention, group))
    mesh = DeviceMesh.from_group([group, group], device, ranks, mesh_dim_names=("kv_heads", "sharing"))
    for kind, parameter in list(attention.qkv.named_parameters()):
        setattr(attention.qkv, kind, _distributed(parameter, mesh, Shard(0), Replicate()))


def _sharing(attention: Any, group: dist.ProcessGroup) -> int:
    """How many ranks share a kv head of an attention whose shapes are still those of the whole."""
    return max(group.size() // kv_heads_of(attention), 1)


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None))


def _localize(model: ModelType, group: dist.ProcessGroup | None) -> ModelType:
    """Keep what lies here as plain tensors, and let the ranks meet where they must."""
    model.eval().requires_grad_(False)
    if group is None or group.size() == 1:
        return model
    vocabulary: int = model.get_parameter("tokens.weight").shape[0]
    made: dict[int, nn.Parameter] = {}
    meeting = Meeting(group)
    model.meeting = meeting  # type: ignore[assignment]
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "attention":
            _keep_own_queries(module, group)
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor) and id(parameter) not in made:
                made[id(parameter)] = _plain(parameter.to_local())
            setattr(module, kind, made.get(id(parameter), parameter))
        _connect(last, module, vocabulary, meeting)
    return model


def _keep_own_queries(attention: Any, group: dist.ProcessGroup) -> None:
    """Of a shared kv head's rows: those of this rank's queries, and the key's and the value's."""
    sharing = _sharing(attention, group)
    if sharing == 1:
        return
    rows = rows_of_sharer(attention, group.rank() % sharing, sharing)
    for kind, parameter in list(attention.qkv.named_parameters()):
        local = parameter.to_local()
        setattr(attention.qkv, kind, _plain(local[rows.to(local.device)]))
    attention.queries_per_key //= sharing


def _plain(local: Tensor) -> nn.Parameter:
    """With memory of its own: a part of a tensor that is whole here would keep all of it alive."""
    shares_memory = local.untyped_storage().nbytes() > local.nbytes
    return nn.Parameter(local.clone() if shares_memory else local, requires_grad=False)


def _connect(last: str, module: Any, vocabulary: int, meeting: Meeting) -> None:
    """Replace what computes only a share by what ends with the whole, by the part's name."""
    group = meeting.group
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    step = -(-vocabulary // group.size())  # as DTensor cuts: equal parts, rounded up, until nothing is left
    first = step * group.rank()
    if last in ("out", "down"):
        module.forward = partial(_multiply, module, meeting)
    elif last == "tokens":
        module.num_embeddings = len(module.weight)
        module.forward = partial(_look_up, module, first, meeting)
    elif last == "head":
        module.project = partial(_project, vocabulary, meeting)
        module.loss = partial(chunked_cross_entropy, group=group, first=first)


def _multiply(linear: Any, meeting: Meeting, input: Tensor) -> Tensor:
    """With this rank's columns, to which belong its features of the input; the bias is added once, to the sum."""
    total = F.linear(input, linear.weight)
    meeting.sum(total)
    return total if linear.bias is None else total.add_(linear.bias)


def _look_up(tokens: Any, first: int, meeting: Meeting, tokens_BS: Tensor) -> Tensor:
    """Rows that lie here; others add theirs, and zeros for the rest."""
    places_BS = tokens_BS - first
    absent_BS = (places_BS < 0) | (places_BS >= len(tokens.weight))
    sum_BSD = F.embedding(places_BS.masked_fill_(absent_BS, 0), tokens.weight)
    sum_BSD.masked_fill_(absent_BS.unsqueeze(-1), 0)
    meeting.sum(sum_BSD)
    return sum_BSD


def _project(vocabulary: int, meeting: Meeting, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The whole logits on the group's first rank; the others have none of them, and a last dimension of 0."""
    group = meeting.group
    step = -(-vocabulary // group.size())
    own = F.linear(hidden, weight, bias)
    if len(weight) < step:
        own = F.pad(own, (0, step - len(weight)))
    if group.rank() > 0:
        meeting.gather(own, None)
        return own[..., :0]
    parts = [torch.empty_like(own) for _ in range(group.size())]
    meeting.gather(own, parts)
    parts[-1] = parts[-1][..., : vocabulary - step * (group.size() - 1)]
    return torch.cat(parts, -1)
