"""From logits to the next token of each sequence, all sequences of a step at once.

Chance is a hash of the request's seed, the answer's number and the token's place (models/counter.py), added to the
logits as Gumbel noise: the largest sum is a draw from their distribution. So what is drawn depends on nothing else: not
on other requests, nor on how often a sequence was pre-empted.

What draws depend on goes to the device as columns of numbers, a row for each sequence; what was drawn stays there until
it is asked for (`Chosen.result`), so that whoever launches steps need not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.models import counter
from echelon.serve.request import Logprob, SamplingParams

COLUMNS = 7  # numbers of 32 bits that a draw depends on: see `Draws.columns`
_COLD = 1e-5  # temperatures up to which only the likeliest token is drawn


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


def sample(
    logits_RV: Tensor,
    draws: Draws,
    columns_CR: Tensor | None = None,
    draw: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Chosen:
    """A token for each row. The columns may be on the device already, and `draw` be faster than `draw_plainly`."""
    if columns_CR is None:
        columns_CR = torch.from_numpy(draws.columns()).to(logits_RV.device)
    logprobs_RV = logits_RV.float().log_softmax(-1) if draws.have_logprobs else None
    if draws.look_back:
        logits_RV = _penalize(logits_RV, draws.each)
    temperature_R, min_p_R, top_p_R = columns_CR[:3].view(torch.float32)
    top_k_R, keys_2R, places_R = columns_CR[3], columns_CR[4:6], columns_CR[6]
    if draws.have_filter:
        logits_RV = _likely(logits_RV, temperature_R, min_p_R, top_p_R, top_k_R, draws.have_limit)
    if draw is None:
        draw = partial(draw_plainly, has_chance=draws.have_chance)
    chosen_R = draw(logits_RV, temperature_R, keys_2R, places_R)
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


def _likely(
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
    logits_RV = logits_RV.float().clone()
    for row, draw in enumerate(draws):
        if not draw.looks_back:
            continue
        params, here = draw.params, logits_RV[row]
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(draw.tokens)), device=here.device)
            old = here[seen]
            here[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        answer = torch.tensor(draw.tokens[draw.prompt :], dtype=torch.int64, device=here.device)
        tokens, counts = answer.unique(return_counts=True)
        here[tokens] -= params.presence_penalty + params.frequency_penalty * counts
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
