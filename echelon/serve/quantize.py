"""The weights of a model's blocks in 8 bits: a quarter of fp32's memory, half of bf16's.

`int8` keeps activations as they are (int8.py); `int8-dynamic` rounds them too, row by row, and multiplies in integers
(through torchao); `fp8` rounds both to 8-bit floats (fp8.py), for GPUs that multiply these. Each output feature has a
scale of its own. Embedding, head and norms stay as they are: rounding is felt most there.

Which is faster depends (benchmarks/quantize.py, benchmarks/h200/serve.py). A step that writes a few tokens waits for
the weights, and in a bf16 model `int8` fetches half as much; many rows at once, as in reading long prompts, are what
`fp8` is for, on a CPU `int8-dynamic`. In a fp32 model `int8` saves memory alone.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.parallel.fp8 import check_device
from echelon.serve import fp8
from echelon.serve.int8 import Int8Weight

KINDS = ("int8", "int8-dynamic", "fp8")
LAYERS = ("qkv", "out", "up", "gate", "down")
ModelType = TypeVar("ModelType", bound=nn.Module)


class QuantizeError(ValueError):
    """What cannot be quantized; it says why, and what to do."""


@torch.no_grad()
def quantize(model: ModelType, kind: str) -> ModelType:
    """Quantize a model's blocks, in place: a whole one, or this rank's shards (`parallel.shards`)."""
    if kind not in KINDS:
        raise QuantizeError(f"quantization {kind!r} is none of {', '.join(KINDS)}")
    kinds = {"int8": Int8Weight.quantize, "fp8": fp8.Fp8Weight.quantize}
    apply = kinds.get(kind) or _int8_dynamic().quantize
    linears = [module for name, module in model.named_modules() if name.rpartition(".")[2] in LAYERS]
    if not linears:
        raise QuantizeError(
            f"{type(model).__name__} has none of the layers that are quantized, by name: {', '.join(LAYERS)}"
        )
    for linear in linears:
        if not isinstance(linear, nn.Linear) or linear.weight.is_meta:
            raise QuantizeError("a model is quantized when its weights are there: fill it first")
        if kind == "fp8":
            _check_fp8(linear)
        apply(linear)
    model.quantized = kind  # type: ignore[assignment]
    return model


def kind_of(model: nn.Module) -> str:
    """The kind that a model was quantized by; none if it was not."""
    return str(getattr(model, "quantized", ""))


def _check_fp8(linear: nn.Linear) -> None:
    try:
        check_device(linear.weight.device)
    except ValueError as error:
        raise QuantizeError(str(error)) from None
    if any(side % fp8.MULTIPLE for side in linear.weight.shape):
        raise QuantizeError(
            f"fp8 multiplies in blocks of {fp8.MULTIPLE}, and the model has a weight of {list(linear.weight.shape)} on "
            "this rank: take another kind, or another number of ranks"
        )


def weight_bytes(model: nn.Module) -> int:
    """What a model's parameters take, with scales where they are quantized."""
    return sum(sum(part.nbytes for part in _parts(parameter)) for parameter in model.parameters())


def _parts(parameter: Any) -> list[torch.Tensor]:
    if not hasattr(parameter, "tensor_data_names"):
        return [parameter]
    names = [*parameter.tensor_data_names, *parameter.optional_tensor_data_names]
    return [part for name in names if (part := getattr(parameter, name)) is not None]


def _int8_dynamic() -> Any:
    try:
        with _quiet():
            from echelon.serve import int8_dynamic
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "torchao":
            raise
        raise QuantizeError("int8-dynamic needs torchao 0.18 or later: pip install 'echelon[quantize]'") from None
    return int8_dynamic


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torchao tells at its import of kernels for other machines and of deprecations inside it, which help nobody."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
