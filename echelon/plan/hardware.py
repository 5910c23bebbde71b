"""How many floating-point operations a device can do in a second, at the most: what MFU is a share of.

For known GPUs it is the figure of their makers' data sheets, without sparsity and, for tensor cores, with sums in fp32.
For the rest, CPUs above all, it is what a product of two matrices reaches here, with the threads that the run has.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from echelon.parallel.apply import DTYPES

_TERA = 1e12
_SECONDS = 0.2  # that measuring takes, at the most


@dataclass(frozen=True)
class Peak:
    """Teraflops by precision; 0 where the data sheet has none, because the hardware is not made for it."""

    bf16: float
    fp16: float
    tf32: float
    fp32: float
    fp64: float


# By words of the name, and the first that fits: what is more special comes first. Where a data sheet shows figures
# with sparsity alone, half of them.
KNOWN: dict[str, Peak] = {
    "B200": Peak(2250, 2250, 1125, 75, 37),  # NVIDIA HGX B200 data sheet, an eighth of it
    "H200 NVL": Peak(835, 835, 417, 60, 60),  # NVIDIA H200 data sheet
    "H200": Peak(989, 989, 494, 67, 67),
    "H100 NVL": Peak(835, 835, 417, 60, 60),  # NVIDIA H100 data sheet
    "H100 PCIe": Peak(756, 756, 378, 51, 51),
    "H100": Peak(989, 989, 494, 67, 67),
    "A100": Peak(312, 312, 156, 19.5, 19.5),  # NVIDIA A100 data sheet
    "A30": Peak(165, 165, 82, 10.3, 10.3),  # NVIDIA A30 data sheet
    "A40": Peak(149.7, 149.7, 74.8, 37.4, 0.6),  # NVIDIA A40 data sheet
    "A10": Peak(125, 125, 62.5, 31.2, 0),  # NVIDIA A10 data sheet
    "V100 PCIE": Peak(0, 112, 0, 14, 7),  # NVIDIA V100 data sheet
    "V100": Peak(0, 125, 0, 15.7, 7.8),
    "T4": Peak(0, 65, 0, 8.1, 0),  # NVIDIA T4 data sheet
    "L40S": Peak(362, 362, 183, 91.6, 0),  # NVIDIA L40S data sheet
    "L40": Peak(181, 181, 90.5, 90.5, 0),  # NVIDIA L40 data sheet
    "L4": Peak(121, 121, 60, 30.3, 0),  # NVIDIA L4 data sheet
    "RTX A6000": Peak(154.8, 154.8, 77.4, 38.7, 0),  # NVIDIA GA102 white paper, table 2
    "RTX 3090": Peak(71, 71, 35.6, 35.6, 0),  # the same, table 3
    "RTX 4090": Peak(165.2, 165.2, 82.6, 82.6, 0),  # NVIDIA Ada white paper, appendix A
    "RTX 5090": Peak(209.5, 209.5, 104.8, 104.8, 0),  # NVIDIA RTX Blackwell white paper, appendix A
    "MI300X": Peak(1307.4, 1307.4, 653.7, 163.4, 163.4),  # AMD Instinct MI300X data sheet
}


def peak_flops(device: torch.device, precision: str) -> float:
    """Operations a second of this device in fp64, fp32, bf16 or fp16."""
    if device.type == "cuda":
        told = known_flops(torch.cuda.get_device_name(device), precision)
        if told is not None:
            return told
    return measured_flops(device, DTYPES[precision])


def known_flops(name: str, precision: str) -> float | None:
    """By the name that a GPU gives itself. In fp32, products may be in tf32 if PyTorch has been told so."""
    words = set(re.split(r"[ -]", name))
    if "MIG" in words:  # a part of a GPU
        return None
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    for model, peak in KNOWN.items():
        if words.issuperset(model.split()):
            return float(getattr(peak, precision)) * _TERA or None
    return None


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """What products reach in a moment, while other ranks on the same cores may be doing the same."""
    size = 4096 if device.type == "cuda" else 512
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(left, right)  # the first one sets up a library
    products, begin = 0, _now(device)
    while not products or time.perf_counter() < begin + _SECONDS:
        torch.mm(left, right)
        products, end = products + 1, _now(device)
    return 2 * size**3 * products / (end - begin)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
