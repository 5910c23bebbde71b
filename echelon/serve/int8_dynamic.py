"""torchao's weights in 8-bit integers, with activations rounded as they come. Imports torchao: when it is needed."""

from __future__ import annotations

from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from torchao.utils import should_reduce_range


def quantize(linear: nn.Linear) -> None:
    """With a bit less where a CPU's sums could overflow."""
    narrower = should_reduce_range(linear.weight.device)
    quantize_(linear, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, reduce_range=narrower))
