"""Random numbers by place instead of by order: the number at (row, column) is a hash of the two and of a key.

A generator's next number depends on how many were drawn before, so each layout of ranks would draw others. Here a rank
that holds a piece computes the numbers of that piece alone, and they are those that a single process has there. All
of it is arithmetic on int32, which wraps around, so it runs on any device and inside a compiled graph.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_WORD = 2**32


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which each bit of the input changes half the bits of the output."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def signed(value: int) -> int:
    """The lowest 32 bits of a number, as an int32 holds them."""
    return (value + _WORD // 2) % _WORD - _WORD // 2


Key = tuple[int, int] | tuple[Tensor, Tensor]  # two words of 32 bits


def number_key(number: int) -> tuple[Tensor, Tensor]:
    """For the part of a model that has this number. Tensors, always on the CPU: numbers would be compiled into a graph,
    and each part need its own.
    """
    low, high = _words((number * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % _WORD**2)
    return as_tensor(low), as_tensor(high)


def as_tensor(value: int) -> Tensor:
    """The lowest 32 bits of a number, on the CPU."""
    return torch.tensor(signed(value), dtype=torch.int32, device="cpu")


def name_key(seed: int, name: str) -> tuple[int, int]:
    """For the parameter that has this name."""
    return _words(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"))


def _words(value: int) -> tuple[int, int]:
    return signed(value), signed(value >> 32)


def rows(key: Key, first: Tensor, *others: Tensor) -> Tensor:
    """One int32 for each row; tensors that broadcast together name it."""
    hashed = mix(first.to(torch.int32) ^ key[0])
    for place in others:
        hashed = mix(hashed ^ place.to(torch.int32))
    return hashed


def elements(key: Key, row: Tensor, columns: Tensor) -> Tensor:
    """One int32 for each row and column, evenly distributed over all int32."""
    column = mix(columns.to(torch.int32) ^ key[1])
    return mix(row[..., None] ^ column)


def normal(key: Key, row: Tensor, columns: Tensor) -> Tensor:
    """fp32 of the standard normal distribution (up to 5.4 of its deviations) for each row and column."""
    between_minus_one_and_one = ((elements(key, row, columns) >> 8).float() + 0.5) / 2**23
    return torch.erfinv(between_minus_one_and_one) * math.sqrt(2)
