"""The step after backward, for every strategy: one torch optimizer over this rank's pieces.

A piece in fp32 or fp64 is updated where it lies, in the parameter's own memory. One in bf16 or fp16 gets a master copy
in fp32, which the optimizer updates and from which the parameter is rounded anew. With `on_cpu` the copies, and
with them the optimizer's state, are in the host's memory, whatever the dtype: gradients go there, new values come
back. The optimizer must work element by element (SGD, Adam, …), since a piece is not a whole matrix.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.parallel.pieces import pieces, reducer_of
from echelon.parallel.reduce import Reducer

LOW = (torch.bfloat16, torch.float16)
GROWTH_INTERVAL = 2000  # good steps after which the loss scale doubles


class Optimizer:
    """`make` is given (name, piece) pairs, as torch's optimizers take them: `partial(torch.optim.AdamW, lr=1e-3)`.

    The strategy comes first, the optimizer after it. A schedule of the learning rate belongs to `inner`, the
    optimizer that `make` made.
    """

    def __init__(
        self,
        make: Callable[[Iterable[tuple[str, Tensor]]], torch.optim.Optimizer],
        model: nn.Module,
        *,
        on_cpu: bool = False,
    ) -> None:
        self._reducer = reducer_of(model)
        self.pieces = pieces(model)  # what it updates, of which parameters
        self._updated = [_updated(piece.memory, on_cpu) for piece in self.pieces]
        self._device = next(model.parameters()).device  # where the world can talk, wherever the pieces are
        self.inner = make([(piece.name, tensor) for piece, tensor in zip(self.pieces, self._updated, strict=True)])
        if any("param_names" not in group for group in self.inner.param_groups):
            raise ValueError(
                "the optimizer was made of bare tensors: give it the (name, tensor) pairs that `make` is given, and "
                "form groups by name (a piece has not the shape of its parameter)"
            )
        self._norm_groups = _norm_groups(model, self._reducer)
        self.is_scaling = any(piece.memory.dtype == torch.float16 for piece in self.pieces)
        self.loss_scale = 2.0**16 if self.is_scaling else 1.0
        self._good_steps = 0
        self.non_finite = ""  # of the parameters whose gradients were not finite in the last step here, the first

    def scale(self, loss: Tensor) -> Tensor:
        """What to call `backward` on: the loss, for fp16 scaled up so that small gradients survive."""
        return loss * self.loss_scale if self.is_scaling else loss

    def kept(self) -> dict[str, list[Tensor]]:
        """What it keeps that has the pieces' shapes: under "" what it updates, then its state, by the state's names."""
        kept = {"": self._updated}
        for name in sorted({name for state in self.inner.state.values() for name in state}):
            values = [(tensor, self.inner.state.get(tensor, {}).get(name)) for tensor in self._updated]
            found = [value for tensor, value in values if isinstance(value, Tensor) and value.shape == tensor.shape]
            if found and name != "step":
                kept[name] = found
        return kept

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> float:
        """Update the parameters, forget the gradients, and return the gradients' norm, over all ranks and before it
        was clipped. If that is not finite, nothing is updated, on any rank.
        """
        if self._reducer is not None:
            self._reducer.finish()
        self._take_gradients()
        norm = self._norm() / self.loss_scale
        self.non_finite = "" if math.isfinite(norm) else self._first_non_finite()
        if math.isfinite(norm):
            self._scale_gradients(norm, max_norm)
            self.inner.step()
            self.write_back()
        self.inner.zero_grad()
        if self._reducer is not None:
            self._reducer.clear()
        self._adapt_loss_scale(math.isfinite(norm))
        return norm

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the parameters, on all ranks, the values of what is updated for them."""
        pairs = zip(self.pieces, self._updated, strict=True)
        _copy([(piece.memory, tensor) for piece, tensor in pairs if tensor is not piece.memory])
        if self._reducer is not None:
            self._reducer.gather_weights()

    def state_dict(self) -> dict[str, Any]:
        """By parameter: the optimizer's state for this rank's piece of it, the master copy if there is one, and where
        in the parameter (what this rank holds of it, flattened) the piece begins.
        """
        saved = self.inner.state_dict()
        states = {name: saved["state"].get(index, {}) for name, index in _indices(saved).items()}
        for piece, tensor in zip(self.pieces, self._updated, strict=True):
            states[piece.name] = {"offset": piece.offset, **states[piece.name]}
            if tensor is not piece.memory:
                states[piece.name]["master"] = tensor
        scale = {"loss_scale": self.loss_scale, "good_steps": self._good_steps}
        return {"parameters": states, "groups": saved["param_groups"], **scale}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the same model, split in the same way."""
        indices = _indices({"param_groups": state["groups"]})
        inner = {"state": {}, "param_groups": state["groups"]}
        for piece, tensor in zip(self.pieces, self._updated, strict=True):
            saved = dict(state["parameters"][piece.name])
            if saved.pop("offset") != piece.offset:
                raise ValueError(f"the state of {piece.name} is of another piece of it: the layouts differ")
            if "master" in saved:
                tensor.copy_(saved.pop("master"))
            if saved:
                inner["state"][indices[piece.name]] = saved
        self.inner.load_state_dict(inner)
        self.loss_scale, self._good_steps = state["loss_scale"], state["good_steps"]

    def _take_gradients(self) -> None:
        copies = []
        for piece, tensor in zip(self.pieces, self._updated, strict=True):
            gradient = piece.take_gradient()
            if gradient is not None and (gradient.device, gradient.dtype) != (tensor.device, tensor.dtype):
                copies.append((torch.empty_like(tensor), gradient))
                gradient = copies[-1][0]
            tensor.grad = gradient
        _copy(copies)

    def _norm(self) -> float:
        """Of all gradients of all ranks, each counted once: one all_reduce of one number over the world. In local SGD
        of the model's own ranks.
        """
        by_copies: dict[int, list[Tensor]] = defaultdict(list)
        for piece, tensor in zip(self.pieces, self._updated, strict=True):
            if tensor.grad is not None and tensor.numel():
                by_copies[piece.copies].append(tensor.grad)
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for copies, gradients in by_copies.items():
            norms = torch.stack(torch._foreach_norm(gradients)).double()
            square += (norms.square().sum() / copies).to(self._device)
        for group in self._norm_groups:
            dist.all_reduce(square, group=group)
        return math.sqrt(square.item())

    def _first_non_finite(self) -> str:
        pairs = zip(self.pieces, self._updated, strict=True)
        found = (p.name for p, tensor in pairs if tensor.grad is not None and not tensor.grad.isfinite().all())
        return next(found, "")

    def _scale_gradients(self, norm: float, max_norm: float | None) -> None:
        factor = 1 / self.loss_scale
        if max_norm is not None:
            factor *= min(1.0, max_norm / (norm + 1e-6))
        gradients = [tensor.grad for tensor in self._updated if tensor.grad is not None]
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)

    def _adapt_loss_scale(self, good: bool) -> None:
        if not self.is_scaling:
            return
        self._good_steps = self._good_steps + 1 if good else 0
        if not good:
            self.loss_scale /= 2
        elif self._good_steps == GROWTH_INTERVAL:
            self.loss_scale *= 2
            self._good_steps = 0


def _updated(memory: Tensor, on_cpu: bool) -> Tensor:
    """What the optimizer updates for a piece: the piece itself, or a copy of it."""
    dtype = torch.float32 if memory.dtype in LOW else memory.dtype
    if on_cpu:
        return memory.to("cpu", dtype, copy=True)
    return memory.to(dtype)


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Into the first of each pair what is in the second: on a GPU a few kernels for all of them."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [source for _, source in pairs])


def _norm_groups(model: nn.Module, reducer: Reducer | None) -> list[dist.ProcessGroup | None]:
    """Over which groups, one after the other, the squares of a whole model's gradients add up; None is the world."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if reducer is None or not reducer.is_apart:
        return [None] if reducer is not None or meshes else []
    groups = [*(mesh.get_group() for mesh in meshes), reducer.group]
    return [group for group in groups if group.size() > 1]


def _indices(saved: dict[str, Any]) -> dict[str, int]:
    """How a torch optimizer's saved state numbers its parameters."""
    return {
        name: index
        for group in saved["param_groups"]
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }
