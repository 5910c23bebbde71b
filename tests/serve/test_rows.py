"""How far steps are filled up."""

from __future__ import annotations

from echelon.serve.rows import layer_seconds, quickest
from tests.serve.models import small


def test_to_what_is_fast() -> None:
    seconds = {448: 3.0, 464: 2.0, 480: 2.5, 496: 1.0, 512: 2.0, 528: 0.5}
    assert quickest(448, seconds.__getitem__) == 496, "of 64 rows more at most"
    assert quickest(448, (seconds | {448: 1.02}).__getitem__) == 448, "no further for what may be chance"


def test_without_a_gpu_to_what_is_asked_for() -> None:
    block = small().blocks[0]
    assert quickest(100, layer_seconds(block.attention, block.mlp)) == 100
