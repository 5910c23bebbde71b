"""A sample of what a language model has learned: it goes on where a held-out text breaks off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from echelon.models import presets
from echelon.models.presets import is_causal
from echelon.parallel.apply import DTYPES
from echelon.train.data.token_file import describe
from echelon.train.data.tokenizer import open_tokenizer
from echelon.train.export import fill

if TYPE_CHECKING:
    from echelon.train.loop import Trainer

_PROMPT = 32  # tokens
_TEMPERATURE = 0.8


def write_sample(trainer: Trainer) -> None:
    """Into the run's folder, by rank 0 alone: of the model in the checkpoint that the run has ended with."""
    config = trainer.config
    if not is_causal(config.architecture) or trainer.grid.rank:
        return
    model = presets.build(config.architecture).to(DTYPES[config.strategies.precision])
    fill(model, trainer.folder / "checkpoints", config.train.steps)
    model.to(trainer.device, torch.float32)
    first = (trainer.sources.held_out or trainer.sources.train).batch(np.zeros(1, np.int64), np.zeros(1, np.int64))
    prompt_S = first["tokens_BS"][0, :_PROMPT].to(trainer.device)
    tokens = generate(model, prompt_S, config.train.sample).tolist()
    (trainer.folder / "sample.txt").write_text(_as_text(tokens, _tokenizer(trainer)))


@torch.no_grad()
def generate(model: Any, tokens_S: Tensor, count: int) -> Tensor:
    """So many tokens more, each drawn by its probability at a temperature below 1; the same ones every time."""
    model.eval()
    generator = torch.Generator(tokens_S.device).manual_seed(0)
    for _ in range(count):
        logits_V = model(tokens_S[None, -model.config.context :])[0, -1]
        probabilities_V = torch.softmax(logits_V.float() / _TEMPERATURE, -1)
        tokens_S = torch.cat([tokens_S, torch.multinomial(probabilities_V, 1, generator=generator)])
    return tokens_S


def _tokenizer(trainer: Trainer) -> str:
    """Which tokenizer made the tokens; empty if nobody knows."""
    data = trainer.config.data
    if data.kind == "tokens":
        described = describe(Path(data.path))
        return described.tokenizer if described else ""
    return "" if data.kind == "synthetic" else data.tokenizer


def _as_text(tokens: list[int], tokenizer: str) -> str:
    return open_tokenizer(tokenizer).decode(tokens) if tokenizer else " ".join(map(str, tokens))
