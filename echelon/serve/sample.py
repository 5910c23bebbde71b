"""From logits to the next token of each sequence, all sequences of a step at once.

Chance is a hash of the request's seed, the answer's number and the token's place (models/counter.py), added to the
logits as Gumbel noise: the largest sum is a draw from their distribution. So what is drawn depends on nothing else: not
on other requests, nor on how often a sequence was pre-empted.

What draws depend on goes to the device as columns of numbers, a row for each sequence; what was drawn stays there until
it is asked for (`Chosen.result`), so that whoever launches steps need not wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.models import counter
from echelon.serve.request import Logprob, SamplingParams

COLUMNS = 7  # numbers of 32 bits that a draw depends on: see `Draws.columns`
_COLD = 1e-5  # temperatures up to which only the likeliest token is drawn


class Seen:
    """Which tokens a sequence has, and how often each stands in its answer. The sequence only grows: what was counted
    is not counted again.
    """

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self._tokens, self._prompt = tokens, prompt
        self._counted = 0
        self._places: dict[int, int] = {}  # of each token, in the arrays
        self._distinct, self._counts = array("i"), array("i")

    def so_far(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        for at in range(self._counted, len(self._tokens)):
            token = self._tokens[at]
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._distinct):
                self._distinct.append(token)
                self._counts.append(0)
            self._counts[place] += at >= self._prompt
        self._counted = len(self._tokens)
        return np.array(self._distinct), np.array(self._counts)


@dataclass(frozen=True, eq=False)
class Draw:
    """What the next token of one sequence is drawn by: its tokens so far, of which some are the prompt's. Their values
    count only where the draw `looks_back`.
    """

    params: SamplingParams
    key: tuple[int, int]
    tokens: list[int]
    prompt: int

    @cached_property
    def looks_back(self) -> bool:
        params = self.params
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def seen(self) -> Seen:
        return Seen(self.tokens, self.prompt)


class Draws:
    """Those of a step. The same sequences draw in most steps after it: what does not change from step to step is worked
    out once.
    """

    def __init__(self, each: Iterable[Draw] = ()) -> None:
        self.each = each = list(each)
        params = [draw.params for draw in each]
        by_chance = [one for one in params if one.temperature > _COLD]
        self.look_back = any(draw.looks_back for draw in each)
        self.have_chance = bool(by_chance)
        self.have_limit = any(one.top_k or one.top_p < 1 for one in by_chance)
        self.have_filter = self.have_limit or any(one.min_p > 0 for one in by_chance)
        asked = [one.logprobs for one in params]
        self.have_logprobs, self.logprobs = any(count is not None for count in asked), asked
        floats = [
            [one.temperature if one.temperature > _COLD else 0.0 for one in params],
            [one.min_p for one in params],
            [one.top_p for one in params],
        ]
        whole = [
            [one.top_k for one in params],
            [draw.key[0] for draw in each],
            [draw.key[1] for draw in each],
            [0] * len(each),
        ]
        self._columns = np.concatenate([np.array(floats, np.float32).view(np.int32), np.array(whole, np.int32)])

    def columns(self) -> NDArray[np.int32]:
        """A row each for temperature, min_p, top_p (fp32, by their bits), top_k, the key's two words, and the place:
        the same array each time.
        """
        self._columns[-1] = [len(draw.tokens) for draw in self.each]
        return self._columns


class Drawn(NamedTuple):
    """The tokens of a step; and how likely they were (by the model, before any filter), if that was asked for."""

    tokens: list[int]
    logprobs: list[Logprob | None] | None = None


class Chosen:
    """What a step has drawn, on the device until it is asked for."""

    def __init__(self, tokens_R: Tensor, logprobs_RV: Tensor | None = None, asked: Sequence[int | None] = ()) -> None:
        """`asked`: of each row, how many of the likeliest tokens to tell."""
        self.tokens_R, self._asked = tokens_R, asked
        kept: list[Tensor] = [tokens_R]
        if logprobs_RV is not None:
            top = logprobs_RV.topk(min(max(count or 0 for count in asked), logprobs_RV.shape[1]))
            kept += [logprobs_RV.gather(1, tokens_R[:, None]), top.values, top.indices]
        self._kept, self._copied = _to_host(kept)

    def result(self) -> Drawn:
        """Waits until the step has been computed."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, *likely = (each.tolist() for each in self._kept)
        if not likely:
            return Drawn(tokens)
        told = []
        for token, count, (own,), values, places in zip(tokens, self._asked, *likely, strict=True):
            top = tuple(zip(places[:count], values[:count], strict=True))
            told.append(None if count is None else Logprob(token, own, top))
        return Drawn(tokens, told)


class Kernels(Protocol):
    """What draws in fewer kernels; see drawing.py."""

    def limit(
        self, logits_RV: Tensor, temperatures_R: Tensor, min_p_R: Tensor, top_p_R: Tensor, top_k_R: Tensor, /
    ) -> tuple[Tensor, Tensor]: ...

    def draw(
        self,
        logits_RV: Tensor,
        temperatures_R: Tensor,
        keys_2R: Tensor,
        places_R: Tensor,
        limits: tuple[Tensor, Tensor] | None,
        /,
    ) -> Tensor: ...


def sample(logits_RV: Tensor, draws: Draws, columns_CR: Tensor | None = None, kernels: Kernels | None = None) -> Chosen:
    """A token for each row. The columns may be on the device already."""
    if columns_CR is None:
        columns_CR = torch.from_numpy(draws.columns()).to(logits_RV.device)
    logprobs_RV = logits_RV.float().log_softmax(-1) if draws.have_logprobs else None
    if draws.look_back:
        logits_RV = _penalize(logits_RV, draws.each)
    temperature_R, min_p_R, top_p_R = columns_CR[:3].view(torch.float32)
    top_k_R, keys_2R, places_R = columns_CR[3], columns_CR[4:6], columns_CR[6]
    by = temperature_R, min_p_R, top_p_R, top_k_R
    if kernels is not None:
        limits = kernels.limit(logits_RV, *by) if draws.have_filter else None
        chosen_R = kernels.draw(logits_RV, temperature_R, keys_2R, places_R, limits)
    else:
        if draws.have_filter:
            logits_RV = likely(logits_RV, *by, draws.have_limit)
        chosen_R = draw_plainly(logits_RV, temperature_R, keys_2R, places_R, draws.have_chance)
    return Chosen(chosen_R, logprobs_RV, draws.logprobs)


def draw_plainly(
    logits_RV: Tensor, temperature_R: Tensor, keys_2R: Tensor, places_R: Tensor, has_chance: bool = True
) -> Tensor:
    """The likeliest token of each row where the temperature is 0, and by chance elsewhere."""
    logits_RV = logits_RV.float()
    if not has_chance:
        return logits_RV.argmax(-1)
    is_cold_R1 = (temperature_R == 0).unsqueeze(1)
    warm_RV = logits_RV / temperature_R.unsqueeze(1).masked_fill(is_cold_R1, 1.0)
    return torch.where(is_cold_R1, logits_RV, warm_RV + _gumbel(keys_2R, places_R, logits_RV.shape[1])).argmax(-1)


def _gumbel(keys_2R: Tensor, places_R: Tensor, vocabulary: int) -> Tensor:
    key = keys_2R[0], keys_2R[1].unsqueeze(1)
    hashed_RV = counter.elements(key, counter.rows(key, places_R), torch.arange(vocabulary, device=keys_2R.device))
    between_0_and_1 = (((hashed_RV >> 9) & 0x7FFFFF).float() + 0.5) / 2**23  # of which fp32 holds every bit
    return -(-between_0_and_1.log()).log()


def likely(
    logits_RV: Tensor, temperature_R: Tensor, min_p_R: Tensor, top_p_R: Tensor, top_k_R: Tensor, has_limit: bool
) -> Tensor:
    """Those that min_p, top_k and top_p leave, one after the other; the others can no more be drawn."""
    logits_RV = logits_RV.float()
    warm_RV = logits_RV / temperature_R.where(temperature_R > 0, 1.0).unsqueeze(1)
    dropped_RV = warm_RV < warm_RV.amax(-1, keepdim=True) + min_p_R.unsqueeze(1).log()
    if has_limit:
        dropped_RV |= _beyond_limit(warm_RV.masked_fill(dropped_RV, -torch.inf), top_k_R, top_p_R.unsqueeze(1))
    return logits_RV.masked_fill(dropped_RV & (temperature_R > 0).unsqueeze(1), -torch.inf)


def _beyond_limit(logits_RV: Tensor, top_k_R: Tensor, top_p_R1: Tensor) -> Tensor:
    """A token stays as long as those before it are fewer than `top_k`, and have less than `top_p` together."""
    sorted_RV, places_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits_RV.shape[1]
    most_R1 = top_k_R.where(top_k_R > 0, vocabulary).unsqueeze(1)
    too_many_RV = torch.arange(vocabulary, device=logits_RV.device) >= most_R1
    probabilities_RV = sorted_RV.masked_fill(too_many_RV, -torch.inf).softmax(-1)
    before_RV = probabilities_RV.cumsum(-1) - probabilities_RV
    before_RV[:, 0] = -1  # the likeliest always stays
    too_many_RV |= (before_RV >= top_p_R1) & (top_p_R1 < 1)
    return torch.empty_like(too_many_RV).scatter_(1, places_RV, too_many_RV)


def _penalize(logits_RV: Tensor, draws: list[Draw]) -> Tensor:
    looking = [row for row, draw in enumerate(draws) if draw.looks_back]
    seen = [draws[row].seen.so_far() for row in looking]
    which = np.repeat(np.arange(len(looking), dtype=np.int32), [len(tokens) for tokens, _ in seen])
    whole = np.stack([which, *(np.concatenate(each) for each in zip(*seen, strict=True))])
    each = [draws[row].params for row in looking]
    penalties = [[one.repetition_penalty, one.presence_penalty, one.frequency_penalty] for one in each]
    device = logits_RV.device
    which_N, tokens_N, counts_N = torch.from_numpy(whole).to(device)
    rows_N = torch.tensor(looking, dtype=torch.int32, device=device)[which_N]
    repetition_N, presence_N, frequency_N = torch.tensor(penalties, device=device)[which_N].T
    logits_RV = logits_RV.to(torch.float32, copy=True)
    old_N = logits_RV[rows_N, tokens_N]
    new_N = torch.where(old_N > 0, old_N / repetition_N, old_N * repetition_N)
    logits_RV[rows_N, tokens_N] = torch.where(counts_N > 0, new_N - (presence_N + frequency_N * counts_N), new_N)
    return logits_RV


def _to_host(tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
    """Copies that are there when the event has come; on the host the tensors themselves."""
    if not tensors[0].is_cuda:
        return tensors, None
    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return copies, copied
