"""All keys are read, each once, and no program has much more to do than another."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echelon.serve.pieces import Pieces

LONGEST = 9000
MACHINES = st.builds(Pieces, st.sampled_from([1, 2, 8, 12]), st.integers(1, 150), st.just(LONGEST))


def read(keys: int, piece: int, pieces: int) -> int:
    """Of which a program of attention reads so many, in blocks of 128."""
    share = math.ceil(math.ceil(keys / pieces) / 128) * 128
    return min(share, keys - piece * share)


@given(MACHINES, st.lists(st.integers(1, LONGEST), max_size=300), st.integers(0, 40))
def test_each_answer_has_its_pieces(pieces: Pieces, keys: list[int], more: int) -> None:
    tiles, joins = (each.tolist() for each in pieces.of(np.array(keys, np.int64)))
    for most_tiles, most_joins in (pieces.most(len(keys)), pieces.most(len(keys) + more)):
        assert len(tiles) <= most_tiles
        assert len(joins) <= most_joins, "there is room for them in a graph"
    found: dict[int, list[tuple[int, int, int]]] = {}
    for answer, count, piece, of, room in tiles:
        assert count == 1
        found.setdefault(answer, []).append((piece, of, room))
    assert sorted(found) == list(range(len(keys)))
    rooms, joined = [], []
    for answer in sorted(found):
        _, of, room = found[answer][0]
        assert sorted(found[answer]) == [(piece, of, room) for piece in range(of)]
        joined += [[answer, of, room]] if of > 1 else []
        rooms += range(room, room + of)
    assert sorted(rooms) == list(range(len(tiles))), "nobody writes where another does"
    assert joins == joined
    sizes = [keys[answer] // of for answer, _, _, of, _ in tiles]
    assert sizes == sorted(sizes, reverse=True), "what takes longest begins first"
    assert all(read(keys[answer], piece, of) > 0 for answer, _, piece, of, _ in tiles), "no piece is empty"


@given(MACHINES, st.lists(st.integers(1, LONGEST), min_size=1, max_size=300))
def test_none_has_much_more_than_its_share(pieces: Pieces, keys: list[int]) -> None:
    share = -(-sum(keys) // pieces._more(len(keys)))
    tiles = pieces.of(np.array(keys, np.int64))[0].tolist()
    assert max(read(keys[answer], piece, of) for answer, _, piece, of, _ in tiles) <= 1.5 * share + 128


def test_one_long_sequence_among_many_is_read_by_many() -> None:
    tiles = Pieces(heads=8, processors=132, longest=32_768).of(np.array([1024] * 63 + [16_384]))[0]
    pieces = {answer: of for answer, _, _, of, _ in tiles.tolist()}
    assert pieces[63] > 16
    assert max(of for answer, of in pieces.items() if answer < 63) <= 2


def test_few_short_ones_are_cut_no_finer_than_helps() -> None:
    assert len(Pieces(heads=8, processors=132, longest=2048).of(np.array([1000]))[0]) == 8
    assert len(Pieces(heads=8, processors=132, longest=2048).of(np.array([100]))[0]) == 1
