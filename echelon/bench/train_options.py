"""What `echelon bench train` was asked for, checked as far as it can be before any rank starts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from echelon.models import presets
from echelon.models.vit import ViTConfig
from echelon.parallel import apply, sequence
from echelon.parallel.apply import Strategies
from echelon.parallel.layout import Layout
from echelon.parallel.recompute import blocks
from echelon.train.config import parse

LENGTH = 1024  # tokens, where a model's context is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One request. Zero stands for the model's own size of image or length of sequence."""

    model: str = "resnet50"
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the model's config
    batch_size: int = 32
    warmup_batches: int = 10
    batches: int = 10  # of an iteration
    iterations: int = 10
    length: int = 0
    image: int = 0
    precision: str = "fp32"
    stage: int = 0
    tp: int = 1
    cp: int = 1
    compile: bool = False
    device: str = "auto"
    json: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> TrainOptions:
        return TrainOptions(**json.loads(text))

    @property
    def config(self) -> presets.Config:
        """The model's, with what was changed."""
        changes = self.changes
        if self.image and isinstance(presets.config(self.model), ViTConfig):
            changes = changes | {"image": self.image}
        return parse({"model": {"name": self.model, **changes}}).architecture

    @property
    def strategies(self) -> Strategies:
        return Strategies(stage=self.stage, precision=self.precision, compile=self.compile)  # type: ignore[arg-type]

    @property
    def layout(self) -> Layout:
        return Layout(dp=-1, tp=self.tp, cp=self.cp)

    @property
    def takes_images(self) -> bool:
        return presets.takes_images(presets.config(self.model))

    @property
    def is_causal(self) -> bool:
        return presets.is_causal(presets.config(self.model))

    @property
    def unit(self) -> str:
        """What is counted."""
        return "img" if self.takes_images else "tokens"

    @property
    def units_in_a_batch(self) -> int:
        return self.batch_size * (1 if self.takes_images else self.sequence_length)

    @property
    def place(self) -> str:
        """What a rank is called."""
        return "GPU" if self.device_type == "cuda" else "CPU"

    @property
    def sequence_length(self) -> int:
        return self.length or min(getattr(self.config, "context", LENGTH), LENGTH)

    @property
    def image_size(self) -> int:
        return self.image or presets.image_side(self.config)

    @property
    def device_type(self) -> str:
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    def check(self, ranks: int) -> None:
        """Raise a `ValueError` that tells the user what is wrong, if anything is."""
        least = {"--batch-size": 1, "--num-warmup-batches": 0, "--num-batches-per-iter": 1, "--num-iters": 1, "-n": 1}
        given = self.batch_size, self.warmup_batches, self.batches, self.iterations, ranks
        for (name, bound), value in zip(least.items(), given, strict=True):
            if value < bound:
                raise ValueError(f"{name} {value}: it is {bound} or more")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"there is no device {self.device!r}: take auto, cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU that PyTorch sees, and there is none here")
        if self.takes_images and self.length:
            raise ValueError(f"--length {self.length}: {self.model} sees images; their size is --image")
        if not self.takes_images and self.image:
            raise ValueError(f"--image {self.image}: {self.model} reads tokens; how many is --length")
        layout, strategies = self.layout.resolve(ranks), self.strategies
        with torch.device("meta"):
            model = presets.build(self.config)
        apply.check(model, layout, strategies)
        if strategies.compile:
            blocks(model)
        if not self.takes_images:
            self._check_length(layout, strategies)

    def _check_length(self, layout: Layout, strategies: Strategies) -> None:
        context, length = getattr(self.config, "context", self.sequence_length), self.sequence_length
        if not 0 < length <= context:
            raise ValueError(f"--length {length}: {self.model} has a context of {context} tokens: use so many or less")
        if layout.cp > 1:
            sequence.positions(strategies.sequence, self.is_causal, length, layout.cp, 0, torch.device("meta"))
        if length // layout.cp % layout.tp:
            step = layout.cp * layout.tp
            raise ValueError(f"--length {length} cannot be split over --tp {self.tp}: take a multiple of {step}")


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """`dim=64` is a field of the model's config, its value as TOML has it."""
    changes = {}
    for text in texts:
        name, is_one, value = text.partition("=")
        if not is_one:
            raise ValueError(f"--set {text}: write name=value, as in --set layers=2")
        try:
            changes[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            raise ValueError(f"--set {text}: {value!r} is no number, list or true or false") from None
    return changes
