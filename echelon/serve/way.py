"""How an engine computes its model here: what is chosen, why, and the way itself."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple, Protocol

import torch

from echelon.parallel import shards
from echelon.serve.plain import Plain
from echelon.serve.quantize import kind_of
from echelon.serve.sample import Chosen, Draws
from echelon.serve.settings import Settings
from echelon.serve.step import Part, Shape

_OLDEST = 8, 0  # of GPUs, by what they can compute, on whose processors the kernels fit


class Way(Protocol):
    def launch(self, parts: list[Part], draws: Draws | None) -> Chosen | None:
        """Begin a step: parts of one token first, then the others. `draws` tell how the next tokens are drawn of those
        that want one, in their order; they are None where another rank draws, and then so is what is returned.
        """


class Choice(NamedTuple):
    """`why_not` says what speaks against the engine's own kernels; without them there is nothing else."""

    fused: bool
    graphs: bool
    ahead: bool
    why_not: str = ""

    def __str__(self) -> str:
        if not self.fused:
            return f"PyTorch's own operations ({self.why_not})"
        graphs = "CUDA graphs" if self.graphs else "no CUDA graphs"
        ahead = "launched one step ahead" if self.ahead else "one step at a time"
        return f"fused kernels, {graphs}, {ahead}"


def choose(model: Any, settings: Settings) -> Choice:
    """For a model that lies where it will be computed."""
    if why_not := obstacle(next(model.parameters()).device, settings) or _misfit(model):
        return Choice(False, False, False, why_not)
    return Choice(True, settings.graphs, settings.ahead and shards.meeting_of(model) is None)


def usual(device: torch.device) -> Choice:
    """What is chosen on a device by default, for the models that this is made for, on one rank."""
    why_not = obstacle(device, Settings())
    return Choice(not why_not, not why_not, not why_not, why_not)


def obstacle(device: torch.device, settings: Settings) -> str:
    """What speaks against the engine's own kernels there, whatever the model; nothing if nothing does."""
    if not has_kernels(device):
        return f"on {device.type}" if device.type != "cuda" else "Triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        return "the GPU is older than Ampere"
    if settings.reproducible:
        return "reproducible"
    return "" if settings.fused else "fused kernels are turned off"


def prepare(model: Any) -> None:
    """Lay a model's weights out for the engine's own kernels, once, before memory is measured."""
    from echelon.serve.fused import join_mlps

    join_mlps(model)


def build(model: Any, shape: Shape, settings: Settings) -> Way:
    choice = choose(model, settings)
    if not choice.fused:
        return Plain(model, shape, settings.reproducible)
    from echelon.serve.fused import Fused, Size

    prepare(model)
    sizes: list[Size] = []
    if choice.graphs:
        sizes = [Size(answers, 0) for answers in sizes_of_answers(settings.most_running)]
        # Several ranks would keep all that they exchange, for each of these, and must not fill steps up differently.
        if shards.meeting_of(model) is None:
            sizes += [Size(*size) for size in sizes_of_mixed(settings.most_running, settings.token_budget)]
    return Fused(model, shape, settings.token_budget, sizes)


def sizes_of_answers(most: int) -> list[int]:
    """Of steps of answers alone, up to so many: near enough to each other that little is computed in vain."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(most, 256), 32)]
    return [*(size for size in steps if size < most), most]


def sizes_of_mixed(most: int, budget: int) -> list[tuple[int, int]]:
    """Of steps that read prompts, too: answers, and tokens of prompts. Steps that read more take so long that launching
    their kernels one by one does not matter.
    """
    answers = sorted({max(most * part // 16, 1) for part in (1, 4, 8, 12, 16)})
    largest = min(budget, 1024)
    reading = [*(size for size in (16, 64, *range(128, 1024, 128)) if size < largest), largest]
    return [(each, read) for each in answers for read in reading]


def has_kernels(device: torch.device) -> bool:
    """Whether the engine's own kernels can run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _misfit(model: Any) -> str:
    from echelon.serve.fused import misfit

    return misfit(model)


def device_text(model: Any) -> str:
    """Where a model is, on how many ranks, and in which precision."""
    weight, meeting, narrow = model.norm.weight, shards.meeting_of(model), kind_of(model)
    device = torch.cuda.get_device_name(weight.device) if weight.is_cuda else weight.device.type
    ranks = "" if meeting is None else f" on {meeting.group.size()} ranks"
    precision = str(weight.dtype).removeprefix("torch.")
    return f"{device}{ranks}, {precision}{f' with {narrow} weights' if narrow else ''}"
