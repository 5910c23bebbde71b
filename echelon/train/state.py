"""The state of training, whatever the layout: whole tensors by name, and which boxes of each this rank holds.

Parameters and buffers are `model.NAME`, what the optimizer keeps is `optimizer.KIND.NAME`, with the names of the plain
model: the same whichever layout, stage or recomputation made them. A master copy is state too, where it says more than
the parameter itself. Of what several ranks hold alike one writes; of buffers, which may differ, and of single numbers
it is the first that has them. A rank of a pipeline holds tensors of its own links alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from echelon.models import held
from echelon.models.chain import apart_of
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.pieces import reducer_of
from echelon.train.boxes import Box, Dealer, boxes

Chunk = tuple[Box, Tensor]  # a box, and the memory that holds it here


@dataclass(frozen=True)
class Held:
    """A tensor of the state, as this rank sees it."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    chunks: list[Chunk]
    writes: bool = True  # whether it is this rank, of those that hold the same, that writes


class State:
    """What of a model and its optimizer this rank holds. (Made between steps; parameters stay where they are.)"""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        gather_no_more(model)
        self._model, self._optimizer = model, optimizer
        self._parameters = {held.name_in(model, name): parameter for name, parameter in model.named_parameters()}
        self._of_others = {
            each.name for each in apart_of(model).values() if not each.leads
        }  # which another stage writes
        self._reducer = reducer_of(model)
        meshes = [each.device_mesh for each in model.parameters() if isinstance(each, DTensor)]
        self._mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)

    def to_save(self) -> dict[str, Held]:
        """All tensors, in the same order on all ranks that hold the same."""
        dealer = Dealer()
        found = self.of_model(dealer)
        is_cut = self._reducer is not None and self._reducer.stage > 0
        for name, kind, tensor, offset in self._of_optimizer():
            if tensor.dim() == 0:
                writes = self._is_first(name) and name not in self._of_others
                of_tensor = Held((), tensor.dtype, [(Box((), ()), tensor)], writes)
            else:
                parameter = self._parameters[name]
                writes = self._writes(dealer, name, tensor.dtype, over_data=not is_cut)
                chunks = _chunks(parameter, tensor, offset)
                of_tensor = Held(tuple(parameter.shape), tensor.dtype, chunks, writes)
            found[f"optimizer.{kind}.{name}"] = of_tensor
        return found

    def of_model(self, dealer: Dealer | None = None) -> dict[str, Held]:
        """Parameters and buffers."""
        dealer = dealer or Dealer()
        found = {}
        for name, tensor in self._parameters.items():
            writes = self._writes(dealer, name, tensor.dtype)
            chunks = _chunks(tensor, held.local(tensor), 0)
            found[f"model.{name}"] = Held(tuple(tensor.shape), tensor.dtype, chunks, writes)
        for name, buffer in self._model.named_buffers():
            chunks, plain_name = _chunks(buffer, buffer, 0), held.plain_name(name)
            found[f"model.{plain_name}"] = Held(tuple(buffer.shape), buffer.dtype, chunks, self._is_first(plain_name))
        return found

    def to_load(self, metadata: Metadata) -> tuple[dict[str, list[Chunk]], dict[str, Any]]:
        """For each tensor of a checkpoint that is needed here the memory to read it into, and what the optimizer is to
        be given then: its state does not exist before its first step, so it is made as the checkpoint has it.
        """
        wanted = {name: list(tensor.chunks) for name, tensor in self.of_model().items()}
        kinds: dict[str, list[str]] = {}
        for fqn in metadata.state_dict_metadata:
            of, _, rest = fqn.partition(".")
            kind, _, name = rest.partition(".")
            if of == "optimizer" and kind != "master":
                kinds.setdefault(name, []).append(kind)
        given = self._optimizer.state_dict()
        updated = updated_tensors(self._optimizer)
        for full_name, state in given["parameters"].items():
            name, offset = held.name_in(self._model, full_name), state["offset"]
            parameter = self._parameters[name]
            if "master" in state:
                master = f"optimizer.master.{name}"
                source = master if master in metadata.state_dict_metadata else f"model.{name}"
                wanted.setdefault(source, []).extend(_chunks(parameter, updated[full_name], offset))
            made: dict[str, Any] = {"offset": offset}
            for kind in kinds.get(name, []):
                fqn = f"optimizer.{kind}.{name}"
                stored: Any = metadata.state_dict_metadata[fqn]
                if len(stored.size) == 0:
                    made[kind] = torch.empty((), dtype=stored.properties.dtype)
                    wanted[fqn] = [(Box((), ()), made[kind])]
                else:
                    made[kind] = torch.empty_like(updated[full_name], dtype=stored.properties.dtype)
                    wanted[fqn] = _chunks(parameter, made[kind], offset)
            given["parameters"][full_name] = made
        return wanted, given

    def _of_optimizer(self) -> Iterator[tuple[str, str, Tensor, int]]:
        """Name, kind, tensor and offset of what the optimizer holds."""
        for full_name, state in self._optimizer.state_dict()["parameters"].items():
            name = held.name_in(self._model, full_name)
            for kind, value in state.items():
                if kind == "offset" or value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise TypeError(f"the optimizer's {kind} of {name} is no tensor but {value!r}: it cannot be saved")
                if kind != "master" or value.dtype != self._parameters[name].dtype:
                    yield name, kind, value, state["offset"]

    def _is_first(self, name: str) -> bool:
        """Whether this is the first rank of the world that has a tensor."""
        model: Any = self._model
        return dist.get_rank() == (model.first_holder(name) if hasattr(model, "first_holder") else 0)

    def _writes(self, dealer: Dealer, name: str, dtype: torch.dtype, over_data: bool = True) -> bool:
        """Whether this rank is the one to write, of all that hold the same of a parameter (and, where `over_data`,
        all ranks of data parallelism do).
        """
        if name in self._of_others:
            return False
        tensor = self._parameters[name]
        place, holders = 0, 1
        if over_data and self._reducer is not None:
            over = self._reducer.mesh_of(name)
            place, holders = over.get_local_rank(), over.size()
        if self._mesh is not None:
            mesh = tensor.device_mesh if isinstance(tensor, DTensor) else self._mesh
            coordinate = mesh.get_coordinate() or ()
            for axis, here in enumerate(coordinate):
                if not isinstance(tensor, DTensor) or tensor.placements[axis].is_replicate():
                    place, holders = place * mesh.size(axis) + here, holders * mesh.size(axis)
        return dealer.deal(tensor.numel() * dtype.itemsize, holders) == place


def gather_no_more(model: nn.Module) -> None:
    """Let FSDP2 forget whole parameters that it has kept (after an evaluation): what counts are the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def updated_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """What the inner optimizer updates, by the names of the parameters."""
    groups = optimizer.inner.param_groups
    return {name: x for group in groups for name, x in zip(group["param_names"], group["params"], strict=True)}


def _chunks(parameter: Tensor, memory: Tensor, offset: int) -> list[Chunk]:
    """Memory that is all this rank holds of a parameter, or a range of that, flattened, from `offset` on."""
    mine = held.part(parameter)
    origin, shape = tuple(each.start for each in mine), tuple(each.stop - each.start for each in mine)
    memory = memory.detach()
    if tuple(memory.shape) == shape:
        return [(Box(origin, shape), memory)] if memory.numel() else []
    found, begin = [], 0
    for box in boxes(shape, offset, offset + memory.numel()):
        size = math.prod(box.sizes)
        found.append((box.at(origin), memory[begin : begin + size].view(box.sizes)))
        begin += size
    return found
