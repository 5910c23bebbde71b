"""What tiles send is what the plan says, whatever functions a model calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.parallel.apply import Strategies, parallelize, part_of
from echelon.parallel.layout import Layout
from echelon.plan.images import Images
from tests.parallel.pipeline.training import by_operation

LAYOUT, STRATEGIES = Layout(sp=(2, 2)), Strategies(precision="fp64")
SHAPE = 2, 3, 19, 22


class Net(nn.Module):
    """A bit of everything that looks beyond a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv2d(3, 4, 5, 2, 2), nn.ConvTranspose2d(4, 4, 3, 2)
        self.groups, self.each = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)
        self.largest, self.average = nn.AdaptiveMaxPool2d((2, 3)), nn.AvgPool2d(3, 2, 1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = self.average(self.each(self.up(F.relu(self.groups(self.first(images_BCHW)), inplace=True))))
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        return self.largest(x).sum() + self.head(F.pad(x, (1, 2, 0, 1), mode="reflect")).flatten(1).mean() + x.mean()


def sent() -> dict[tuple[str, str], int]:
    """By a rank, in one pass: to other tiles."""
    torch.manual_seed(0)
    model = parallelize(Net().double(), LAYOUT.build(), STRATEGIES)
    images = torch.randn(SHAPE, dtype=torch.float64)
    with echelon.comm.record() as records:
        model(images).backward()
    return by_operation(record for record in records if record.dimension == "sp")


def test_every_function_sends_what_was_planned(ranks: Any) -> None:
    with torch.device("meta"):
        model, example = Net(), [torch.empty(SHAPE)]
    images = Images(model, LAYOUT, STRATEGIES, example)
    for rank, told in enumerate(ranks(4, sent)):
        planned = images.passes(rank, part_of(model, LAYOUT, STRATEGIES, rank, 1, example)).sent[0, "down"]
        assert told == planned
        assert set(told) == {("sp", operation) for operation in ("send", "all_reduce", "all_gather")}
