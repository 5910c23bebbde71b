"""Windows of tokens as what a model learns from: the next token, or tokens that were masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.parallel.loss import IGNORED
from echelon.train.data import chance
from echelon.train.data.errors import DataError

Numbers = NDArray[np.int64]
_REPLACED, _RANDOM = 0.8, 0.1  # of the masked tokens: by the mask, by any token; the rest stays and is asked for too


class Windows(Protocol):
    """Runs of tokens by their numbers, each as long as a sequence and one more."""

    def __len__(self) -> int: ...

    def read(self, numbers: Numbers) -> Numbers: ...


@dataclass(frozen=True)
class NextToken:
    """Sequences of a causal model: each target is the token that follows."""

    windows: Windows
    vocabulary: int  # of the model

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, numbers: Numbers, epochs: Numbers) -> dict[str, Tensor]:
        tokens = torch.from_numpy(_checked(self.windows.read(numbers), numbers, self.vocabulary))
        return {"tokens_BS": tokens[:, :-1], "targets_BS": tokens[:, 1:]}


@dataclass(frozen=True)
class Masked:
    """Sequences of a masked model, as BERT's: some tokens are hidden, others in each epoch, and these are asked for."""

    windows: Windows
    vocabulary: int
    mask: int  # the token that hides others
    share: float
    seed: int

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, numbers: Numbers, epochs: Numbers) -> dict[str, Tensor]:
        tokens = _checked(self.windows.read(numbers), numbers, self.vocabulary)[:, :-1]
        place = epochs[:, None], numbers[:, None], np.arange(tokens.shape[1])
        hidden = chance.fractions(self.seed, 0, *place) < self.share
        targets = np.where(hidden, tokens, IGNORED)
        how, anything = chance.fractions(self.seed, 1, *place), chance.below(self.vocabulary, self.seed, 2, *place)
        tokens = np.where(hidden & (how < _REPLACED), self.mask, tokens)
        tokens = np.where(hidden & (how >= 1 - _RANDOM), anything, tokens)
        return {"tokens_BS": torch.from_numpy(tokens), "targets_BS": torch.from_numpy(targets)}


def _checked(tokens: Numbers, numbers: Numbers, vocabulary: int) -> Numbers:
    if tokens.size and int(tokens.max()) >= vocabulary:
        sample, _ = np.unravel_index(int(tokens.argmax()), tokens.shape)
        raise DataError(
            f"sample {numbers[sample]} holds the token {tokens.max()}, but the model's vocabulary ends at "
            f"{vocabulary - 1}: prepare the data with the model's tokenizer, or set [model] vocabulary"
        )
    return tokens
