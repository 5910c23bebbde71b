"""The memory that is sent: PyTorch's, NumPy's, CuPy's or anyone's that has the array or the CUDA-array interface.

A buffer is seen in two ways without a copy: as a tensor, for `torch.distributed`, and as the object itself, for mpi4py.
Pickled objects are NumPy arrays that mpi4py's lower-case methods send whole, and replace.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NAMES = ("torch", "numpy", "pickle", "cupy")
_MAKERS = {"numpy": "numpy:zeros", "pickle": "numpy:zeros", "cupy": "cupy:zeros"}


class BadBuffer(ValueError):
    """A kind of buffer that cannot be had here; the message says why."""


@dataclass(slots=True)
class Buffer:
    """`memory` is what mpi4py gets; `tensor` is the same bytes as PyTorch sees them."""

    memory: Any
    tensor: torch.Tensor

    def write(self, values: np.ndarray) -> None:
        self.tensor.copy_(torch.from_numpy(values))

    def read(self) -> np.ndarray:
        return self.tensor.cpu().numpy()

    def keep(self, received: Any) -> None:
        """Have what was unpickled in place of what was there."""
        raise TypeError("only a pickled object is received as a new one")


class Pickled(Buffer):
    """An array, or a list of them, that is never written into: a new one comes with every message."""

    def write(self, values: np.ndarray) -> None:
        self.memory = values

    def read(self) -> np.ndarray:
        return np.concatenate(self.memory) if isinstance(self.memory, list) else np.asarray(self.memory)

    def keep(self, received: Any) -> None:
        self.memory = received


@dataclass(frozen=True, slots=True)
class BufferKind:
    """`torch`, `numpy`, `pickle`, `cupy`, or `module:function` for a function of (count, dtype) that makes an array."""

    name: str

    @property
    def pickles(self) -> bool:
        return self.name == "pickle"

    @property
    def label(self) -> str:
        return self.name.split(":", maxsplit=1)[0]

    def check(self, device: str) -> None:
        """Raise `BadBuffer` if there can be none."""
        if self.name != "torch" and device != "cpu" and self.label != "cupy":
            raise BadBuffer(f"--device {device} is for torch buffers, and a {self.label} buffer decides for itself")
        if self.name == "cupy":
            if importlib.util.find_spec("cupy") is None:
                raise BadBuffer("cupy is not installed in this environment: pip install cupy-cuda13x (or -cuda12x)")
            if not torch.cuda.is_available():
                raise BadBuffer("a cupy buffer needs a GPU, and PyTorch sees none here")
        elif self.name not in NAMES:
            if ":" not in self.name:
                raise BadBuffer(
                    f"there is no buffer {self.name!r}: take one of {', '.join(NAMES)}, or module:function for a "
                    "function of (count, dtype) whose result has the array or the CUDA-array interface"
                )
            self.make(1, np.dtype(np.uint8), "cpu")

    def make(self, count: int, dtype: np.dtype[Any], device: str) -> Buffer:
        if self.name == "torch":
            tensor = torch.zeros(count, dtype=_torch_dtype(dtype), device=device)
            return Buffer(tensor.numpy() if tensor.is_cpu else tensor, tensor)
        made = self._maker()(count, dtype)
        return (Pickled if self.pickles else Buffer)(*views(made))

    def _maker(self) -> Callable[..., Any]:
        module, _, function = _MAKERS.get(self.name, self.name).partition(":")
        try:
            made: Callable[..., Any] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise BadBuffer(f"the buffer {self.name!r} cannot be made: {error}") from None
        return made


def views(made: Any) -> tuple[Any, torch.Tensor]:
    """An object with the array or the CUDA-array interface, as mpi4py takes it and as a tensor."""
    if hasattr(made, "__cuda_array_interface__"):
        return made, torch.as_tensor(made, device="cuda")
    if hasattr(made, "__array_interface__"):
        array = np.asarray(made)
        return array, torch.from_numpy(array)
    raise BadBuffer(f"a {type(made).__name__} has neither the array nor the CUDA-array interface")


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
