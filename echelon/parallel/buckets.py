"""Which parameters travel together, and where each lies in the flat tensor that travels.

A model's units are the entries of its `nn.ModuleList`s (its blocks) and, as one more, the rest. A bucket is the
trainable parameters of one unit that have one dtype, in the model's order: nothing is joined or cut to a size, so
whoever counts bytes beforehand needs the shapes alone. A parameter that another stage of a pipeline has, too, is a
bucket of its own, so that both cut it alike. What a rank holds of a parameter that is split over another mesh (a
DTensor) is all that counts here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from echelon.comm.torch_compat import local_tensor
from echelon.models.chain import apart_of

ALIGNMENT = 16  # bytes: matrix products are slow on weights that begin in between


def unit_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The units but the rest, by their names: the entries of the outermost module lists."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{unit}.") for unit in found):
            found |= {f"{name}.{key}": child for key, child in module.named_children()}
    return found


def units(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each unit, by their names in the model; those of the rest under "", last. A parameter that
    has several names goes by its first.
    """
    modules = unit_modules(model)
    found: dict[str, dict[str, nn.Parameter]] = {unit: {} for unit in [*modules, ""]}
    for name, parameter in model.named_parameters():
        unit = next((unit for unit in modules if name.startswith(f"{unit}.")), "")
        found[unit][name] = parameter
    return found


def aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def lay_out(counts: Sequence[int], element_size: int, parts: int | None) -> tuple[list[int], int]:
    """Where parameters of so many elements begin in their bucket, and how long it is: one after the other, or, to be
    cut into equal parts, each aligned and with padding at the end.
    """
    step = 1 if parts is None else ALIGNMENT // element_size
    places, end = [], 0
    for count in counts:
        places.append(end)
        end = aligned(end + count, step)
    return places, aligned(end, step * (parts or 1))


@dataclass(eq=False)
class Bucket:
    """Parameters that travel together, by name, and where each begins in the flat tensor."""

    parameters: dict[str, nn.Parameter]
    places: dict[nn.Parameter, int]
    length: int
    mesh: DeviceMesh  # the ranks that hold these
    weights: Tensor | None = None  # the memory that the parameters are views of, if they are
    flat: Tensor | None = None  # this rank's gradients, on their way
    arriving: Tensor | None = None  # what the reduction writes to
    work: Work | None = None
    reduced: Tensor | None = None  # this rank's part of their sum over the ranks
    waiting: set[nn.Parameter] = field(default_factory=set)  # whose gradients are still to come in this backward pass

    def empty(self) -> Tensor:
        """Zeros for all that is in here."""
        first = local_tensor(next(iter(self.places)))
        return torch.zeros(self.length, dtype=first.dtype, device=first.device)

    def view(self, flat: Tensor, parameter: nn.Parameter) -> Tensor:
        """Where a flat tensor holds a parameter, in the parameter's shape."""
        local: Tensor = local_tensor(parameter)
        place = self.places[parameter]
        return flat[place : place + local.numel()].view(local.shape)

    def own_weights(self) -> None:
        """Move the parameters into one flat tensor."""
        self.weights = self.empty()
        for parameter in self.places:
            view = self.view(self.weights, parameter)
            view.copy_(local_tensor(parameter).detach())
            local_tensor(parameter).data = view

    def take(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient, if it has one, into the flat tensor."""
        if self.flat is None:
            self.flat = self.empty()
        gradient = take_gradient(parameter)
        if gradient is not None:
            self.view(self.flat, parameter).copy_(gradient)


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What this rank has of a parameter's gradient, which is gone from the parameter then. Over a mesh where it is
    still a share of a sum, it is completed.
    """
    gradient = parameter.grad
    parameter.grad = None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    local: Tensor | None = local_tensor(gradient)
    return local


MeshOf = Callable[[str], DeviceMesh]  # of a parameter's name: the ranks that hold it


def buckets(model: nn.Module, mesh_of: MeshOf, parts: int | None) -> list[Bucket]:
    """A model's buckets in the order in which backward completes them: the last block's first, the rest's last."""
    *blocks, rest = units(model).values()
    apart = apart_of(model)
    found = []
    for unit in [*reversed(blocks), rest]:
        together: dict[tuple[torch.dtype, str, DeviceMesh], dict[str, nn.Parameter]] = defaultdict(dict)
        for name, parameter in unit.items():
            if parameter.requires_grad:
                together[parameter.dtype, name if name in apart else "", mesh_of(name)][name] = parameter
        for (dtype, _, mesh), parameters in together.items():
            counts = [local_tensor(parameter).numel() for parameter in parameters.values()]
            places, length = lay_out(counts, dtype.itemsize, parts)
            found.append(Bucket(parameters, dict(zip(parameters.values(), places, strict=True)), length, mesh))
    return found
