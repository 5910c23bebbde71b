"""What tiles do to memory, and what a shortcut through them does to results: `python benchmarks/spatial_plot.py`.

Draws docs/spatial.png. On the left what a training pass saves for its backward pass, from results/spatial.json. Then
what happens if each of four tiles is computed by itself, its borders padded with zeros and its norms its own, as if it
were an image: how far a ResNet-18's features of a generated slide are from the whole image's, and how far the weights'
gradients are. (Of `spatial.tile` the same are rounding: `tests/parallel/test_spatial.py`.)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from echelon.models.presets import build  # noqa: E402
from echelon.train.data.pathology import Slide  # noqa: E402

SIDE, TILES = 512, 4
DARK, PALE = "#1f4e79", "#9dc3e6"


def features(model: Any, x_BCHW: Tensor) -> Tensor:
    """What the second stage gives."""
    out: Tensor = torch.nn.functional.max_pool2d(torch.relu(model.stem(x_BCHW)), 3, stride=2, padding=1)
    for stage in ("0", "1"):
        for block in model.stages.get_submodule(stage).children():
            out = block(out)
    return out


def shortcut() -> tuple[Tensor, dict[str, float]]:
    """Of each pixel of the features the relative error, and of each weight's gradient."""
    pixels = Slide(0, 1, SIDE, tumour=True).pixels(range(SIDE), range(SIDE))
    x_BCHW = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].double() / 127.5 - 1
    told = []
    for tiles in (1, TILES):
        model = build("resnet18", classes=2).double()
        found = torch.cat([features(model, each) for each in x_BCHW.chunk(tiles, 2)], 2)
        found.square().mean().backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        told.append((found.detach(), gradients))
    (whole, exact), (cut, theirs) = told
    error_HW = (cut - whole).abs().mean((0, 1)) / whole.abs().mean()
    convolutions = [name for name in exact if exact[name].dim() == 4]
    return error_HW, {n: ((theirs[n] - exact[n]).norm() / exact[n].norm()).item() for n in convolutions}


def main() -> None:
    memory = json.loads((ROOT / "benchmarks/results/spatial.json").read_text())["memory"]
    error_HW, gradients = shortcut()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    places = np.arange(len(memory))
    one = [each["saved, MiB"]["one process"] / 1024 for each in memory.values()]
    tile = [max(each["saved, MiB"]["a tile"]) / 1024 for each in memory.values()]
    left.bar(places - 0.2, one, 0.4, color=PALE, label="one process")
    left.bar(places + 0.2, tile, 0.4, color=DARK, label="a rank of four")
    for place, (high, low) in enumerate(zip(one, tile, strict=True)):
        left.text(place + 0.2, low, f" {low / high:.2f} ×", ha="center", va="bottom", fontsize=9)
    left.set_xticks(places, [name.replace(" ", "\n") for name in memory], fontsize=9)
    left.set_ylabel("GiB saved for the backward pass")
    left.set_title("What a pass saves")
    left.legend(frameon=False)
    shown = middle.imshow(error_HW, cmap="magma_r", vmin=0)
    for border in range(1, TILES):
        middle.axhline(border * len(error_HW) / TILES - 0.5, color="#888888", linewidth=0.5)
    middle.set_title("Tiles computed apart: error of the features,\nrelative to their mean")
    middle.set_xticks([])
    middle.set_yticks([])
    figure.colorbar(shown, ax=middle)
    right.plot(range(1, len(gradients) + 1), list(gradients.values()), "o-", color=DARK)
    right.set_ylim(bottom=0)
    right.set_xlabel("convolution, from the first")
    right.set_title("The same: error of the weights' gradients,\nrelative to their norm")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/spatial.png", dpi=110)
    print(f"features: mean {error_HW.mean():.3f}, most {error_HW.max():.2f}")
    print("gradients: " + ", ".join(f"{name} {error:.2f}" for name, error in gradients.items()))


if __name__ == "__main__":
    main()
