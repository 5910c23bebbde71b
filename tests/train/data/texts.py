"""Texts and a tokenizer to try things with."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "größer,", "schöner:", "你好", "👋", "\t(x + y)", "==", "42;"]


def write_texts(folder: Path, files: int = 12, lines: int = 40, seed: int = 0) -> list[Path]:
    """Files in folders, with lines of words."""
    chosen = random.Random(seed)
    paths = []
    for number in range(files):
        path = folder / f"{number % 3}" / f"text{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(" ".join(chosen.choices(WORDS, k=chosen.randint(0, 20))) for _ in range(lines))
        path.write_text(text + "\n", encoding="utf-8")
        paths.append(path)
    return sorted(paths)


def write_tokenizer(folder: Path, vocabulary: int = 400, special: tuple[str, ...] = ("<|endoftext|>",)) -> Path:
    """A byte-pair tokenizer that has learned from the words."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
