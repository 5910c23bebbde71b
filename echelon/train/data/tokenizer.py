"""The tokenizer that a config or a command names: one that cannot be used is an error of the data."""

from __future__ import annotations

from echelon.models import tokenizer
from echelon.train.data.errors import DataError


def open_tokenizer(name: str) -> tokenizer.Tokenizer:
    try:
        return tokenizer.open_tokenizer(name)
    except tokenizer.TokenizerError as error:
        raise DataError(str(error)) from None
