"""From logits to the next token of each sequence, all sequences of a step at once.

Chance is a hash of the request's seed, the answer's number and the token's place (models/counter.py), added to the
logits as Gumbel noise: the largest sum is a draw from their distribution. So what is drawn depends on nothing else: not
on other requests, nor on how often a sequence was pre-empted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.models import counter
from echelon.serve.request import Logprob, SamplingParams

_COLD = 1e-5  # temperatures up to which only the likeliest token is drawn


@dataclass(frozen=True)
class Draw:
    """What the next token of one sequence is drawn by: its tokens so far, of which some are the prompt's."""

    params: SamplingParams
    key: tuple[int, int]
    tokens: list[int]
    prompt: int


def sample(logits_RV: Tensor, draws: list[Draw]) -> list[Logprob]:
    """A token for each row, with how likely it was if that is asked for (by the model, before any filter)."""
    logits_RV = logits_RV.float()
    told_R = _logprobs(logits_RV, draws)
    logits_RV = _penalize(logits_RV, draws)
    chosen_R = logits_RV.argmax(-1)
    chance = [row for row, draw in enumerate(draws) if draw.params.temperature > _COLD]
    if chance:
        by_chance = [draws[row] for row in chance]
        chosen_R[chance] = _draw(logits_RV[chance], by_chance)
    return [
        Logprob(token, *told(token)) if told else Logprob(token, 0.0)
        for token, told in zip(chosen_R.tolist(), told_R, strict=True)
    ]


def _draw(logits_RV: Tensor, draws: list[Draw]) -> Tensor:
    device = logits_RV.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    params = [draw.params for draw in draws]
    logits_RV = logits_RV / column([each.temperature for each in params])
    if any(each.min_p > 0 for each in params):
        likeliest = logits_RV.max(-1, keepdim=True).values
        logits_RV = logits_RV.masked_fill(
            logits_RV < likeliest + column([each.min_p for each in params]).log(), -torch.inf
        )
    if any(each.top_k or each.top_p < 1 for each in params):
        logits_RV = _likeliest(logits_RV, [each.top_k for each in params], column([each.top_p for each in params]))
    return (logits_RV + _gumbel(draws, logits_RV.shape[1], device)).argmax(-1)


def _likeliest(logits_RV: Tensor, top_k: list[int], top_p_R1: Tensor) -> Tensor:
    """The others can no more be drawn. A token stays as long as those before it have less than `top_p` together."""
    sorted_RV, places_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits_RV.shape[1]
    most_R1 = torch.tensor([min(k or vocabulary, vocabulary) for k in top_k], device=logits_RV.device).unsqueeze(1)
    sorted_RV = sorted_RV.masked_fill(torch.arange(vocabulary, device=logits_RV.device) >= most_R1, -torch.inf)
    probabilities_RV = sorted_RV.softmax(-1)
    before_RV = probabilities_RV.cumsum(-1) - probabilities_RV
    before_RV[:, 0] = -1  # the likeliest always stays
    sorted_RV = sorted_RV.masked_fill((before_RV >= top_p_R1) & (top_p_R1 < 1), -torch.inf)
    return torch.full_like(logits_RV, -torch.inf).scatter_(1, places_RV, sorted_RV)


def _gumbel(draws: list[Draw], vocabulary: int, device: torch.device) -> Tensor:
    columns_V = torch.arange(vocabulary, device=device)
    rows = []
    for draw in draws:
        row = counter.rows(draw.key, torch.tensor(len(draw.tokens), device=device))
        rows.append(counter.elements(draw.key, row, columns_V))
    between_0_and_1 = ((torch.stack(rows) >> 8).double() + 2**23 + 0.5) / 2**24
    return -(-between_0_and_1.log()).log().float()


def _penalize(logits_RV: Tensor, draws: list[Draw]) -> Tensor:
    copied = False
    for row, draw in enumerate(draws):
        params = draw.params
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0):
            continue
        if not copied:
            logits_RV, copied = logits_RV.clone(), True
        here = logits_RV[row]
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(draw.tokens)), device=here.device)
            old = here[seen]
            here[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        answer = torch.tensor(draw.tokens[draw.prompt :], dtype=torch.int64, device=here.device)
        tokens, counts = answer.unique(return_counts=True)
        here[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    return logits_RV


class _Told:
    """The logprob of a token of one row, and the likeliest tokens with theirs."""

    def __init__(self, logprobs_V: Tensor, top: int) -> None:
        self._logprobs_V = logprobs_V
        values, tokens = logprobs_V.topk(min(top, len(logprobs_V)))
        self._top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))

    def __call__(self, token: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        return self._logprobs_V[token].item(), self._top


def _logprobs(logits_RV: Tensor, draws: list[Draw]) -> list[_Told | None]:
    return [
        None if draw.params.logprobs is None else _Told(logits_RV[row].log_softmax(-1), draw.params.logprobs)
        for row, draw in enumerate(draws)
    ]
