"""Each kernel of serving beside plain PyTorch, over random shapes, page placements and lengths; on any device.

On a GPU the kernels are compiled; elsewhere Triton's interpreter computes them (see test_kernels.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.models import counter
from echelon.models.parts import Rope
from echelon.serve.fp8 import in_8_bits_plainly
from echelon.serve.int8 import Int8Weight
from echelon.serve.request import SamplingParams
from echelon.serve.sample import Draw, Draws, draw_plainly

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass
class Case:
    """Sequences, of each of which the last few tokens are queries; the pages of each lie anywhere in the cache."""

    device: str
    dtype: torch.dtype
    heads: int
    shared: int
    dim: int
    page: int
    lengths: list[int]
    queries: list[int]  # of each sequence
    seed: int

    def __post_init__(self) -> None:
        choice = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        pages = [-(-length // self.page) for length in self.lengths]
        count = sum(pages) + 3
        order = choice.sample(range(count), count)
        self.table = torch.full((len(pages) + 2, max(pages)), count)  # what is not a sequence's is nowhere
        rows = choice.sample(range(len(pages) + 2), len(pages))
        for row, used in zip(rows, pages, strict=True):
            self.table[row, :used] = torch.tensor([order.pop() for _ in range(used)])
        spans = list(zip(rows, self.lengths, self.queries, strict=True))
        self.rows = torch.tensor([row for row, _, asked in spans for _ in range(asked)])
        self.positions = torch.cat([torch.arange(length - asked, length) for _, length, asked in spans])
        self.table, self.rows, self.positions = (
            x.int().to(self.device) for x in (self.table, self.rows, self.positions)
        )
        self.keys, self.values = (self.draw(count, self.page, self.heads, self.dim) for _ in range(2))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def places(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """The page, and the place in it, of each token of a row."""
        at = torch.arange(length, device=self.device)
        return self.table[row].long()[at // self.page], at % self.page


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    worst = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    return worst <= BOUNDS[dtype] * max(expected.double().abs().max().item(), 1.0)


def check_norm(kernels: Any, device: str, dtype: torch.dtype, rows: int, dim: int, centred: bool, adds: bool) -> None:
    generator = torch.Generator().manual_seed(rows * dim)
    stream, added = (torch.randn(rows, dim, generator=generator).to(device, dtype) for _ in range(2))
    weight, bias = (torch.randn(dim, generator=generator).to(device, dtype) for _ in range(2))
    total = stream + added if adds else stream.clone()
    rms = F.rms_norm(total, (dim,), weight, 1e-5)
    expected = F.layer_norm(total, (dim,), weight, bias, 1e-5) if centred else rms
    found = kernels.norm(stream, added if adds else None, weight, bias if centred else None, 1e-5, centred=centred)
    assert torch.equal(stream, total)
    assert close(found, expected, dtype)


def check_enter(kernels: Any, case: Case, turns: bool, norms: bool) -> None:
    tokens, half = len(case.rows), case.dim // 2
    qkv = case.draw(tokens, case.heads * (case.shared + 2) * case.dim)
    qkv[0, -1], qkv[-1, -case.dim] = math.inf, math.nan  # of values: they may not get into the cache
    q_norm, k_norm = case.draw(case.dim), case.draw(case.dim)
    lines = qkv.view(tokens, case.heads, case.shared + 2, case.dim)
    q, k, v = lines[:, :, :-2].flatten(1, 2), lines[:, :, -2], lines[:, :, -1]
    if norms:
        q, k = F.rms_norm(q, (case.dim,), q_norm, 1e-6), F.rms_norm(k, (case.dim,), k_norm, 1e-6)
    table = None
    if turns:
        rope = Rope(10000.0)
        q, k = (rope.rotate(x.transpose(0, 1), case.positions).transpose(0, 1) for x in (q, k))
        frequencies = rope.frequencies(case.dim, torch.device(case.device), torch.float32)
        angles = torch.arange(max(case.lengths), device=case.device)[:, None] * frequencies
        table = torch.cat([angles.cos(), angles.sin()], -1)
        assert table.shape[1] == 2 * half
    expected = case.keys.clone(), case.values.clone()
    pages = case.table[case.rows.long(), case.positions.long() // case.page].long()
    for cache, new in zip(expected, (k, v), strict=True):
        cache[pages, case.positions.long() % case.page] = new.nan_to_num(0.0, 0.0, 0.0)
    found = kernels.enter(
        qkv,
        table,
        (q_norm, k_norm, 1e-6) if norms else None,
        case.rows,
        case.positions,
        case.table,
        case.keys,
        case.values,
    )
    assert close(found, q, case.dtype)
    assert close(case.keys, expected[0], case.dtype)
    assert torch.equal(case.values, expected[1]), "values go where they belong, as they are, and nothing else changes"


def check_attend(kernels: Any, case: Case, tile: int, pieces: Sequence[int] = ()) -> None:
    """Keys are in one of these numbers of pieces, some of them empty."""
    q = case.draw(len(case.rows), case.heads * case.shared, case.dim)
    tiles: list[tuple[int, ...]] = []
    joins = [(0, 0, 0)]  # which is none
    chance = random.Random(case.seed)
    expected, first = torch.empty_like(q), 0
    for length, asked in zip(case.lengths, case.queries, strict=True):
        for at in range(0, asked, tile):
            count = chance.choice(pieces or [1])
            room = len(tiles)
            joins += [(first + at, count, room)] if count > 1 else []
            tiles += [(first + at, min(tile, asked - at), piece, count, room) for piece in range(count)]
        page, place = case.places(int(case.rows[first]), length)
        k, v = (x[page, place].transpose(0, 1).double() for x in (case.keys, case.values))
        mine = q[first : first + asked].transpose(0, 1).double()
        hidden = torch.arange(length, device=case.device) > case.positions[first : first + asked, None]
        k, v = (x.repeat_interleave(case.shared, 0) for x in (k, v))
        scores = (mine @ k.transpose(1, 2) / math.sqrt(case.dim)).masked_fill(hidden, -math.inf)
        expected[first : first + asked] = (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)
        first += asked
    chance.shuffle(tiles)
    tiles.append((0, 0, 0, 1, 0))  # which is none
    out = torch.full_like(q, math.nan)
    tiles_X5, joins_J3 = (torch.tensor(each, dtype=torch.int32, device=case.device) for each in (tiles, joins))
    where = case.rows, case.positions, case.table, case.keys, case.values
    kernels.attend(q, tiles_X5, *where, out, queries=tile, joins_J3=joins_J3 if pieces else None)
    assert close(out, expected, case.dtype)


def check_far_pages(kernels: Any, device: str, dtype: torch.dtype, pages: int) -> None:
    """What lies at the end of a large cache is as if it lay in a small one."""
    case = Case(device, dtype, heads=8, shared=2, dim=128, page=16, lengths=[40], queries=[1], seed=0)
    few, qkv = len(case.keys), case.draw(1, 8 * 4 * 128)
    far = [x.new_zeros(pages, *x.shape[1:]) for x in (case.keys, case.values)]
    for large, cache in zip(far, (case.keys, case.values), strict=True):
        large[-few:] = cache
    tiles = torch.tensor([[0, 1, 0, 2, 0], [0, 1, 1, 2, 0]], dtype=torch.int32, device=device)
    joins = torch.tensor([[0, 2, 0]], dtype=torch.int32, device=device)
    found = []
    for table, keys, values in ((case.table, case.keys, case.values), (case.table + (pages - few), *far)):
        where = case.rows, case.positions, table, keys, values
        q = kernels.enter(qkv, None, None, *where)
        kernels.attend(q, tiles, *where, out := torch.empty_like(q), queries=1, joins_J3=joins)
        found.append(out)
    assert torch.equal(*found)
    assert torch.equal(far[0][-few:], case.keys)
    assert not far[0][:-few].any()


def check_gated(kernels: Any, device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    both = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(width)).to(device, dtype)
    gate, up = both.chunk(2, -1)
    assert close(kernels.gated(both), F.silu(gate) * up, dtype)


def check_in_8_bits(kernels: Any, device: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(device, dtype)
    x[-1] = 0
    for found, scales in (kernels.in_8_bits(x), in_8_bits_plainly(x)):
        wrong = (found.double() * scales - x.double()).abs()
        assert (wrong <= 1.001 * (x.double().abs() / 16 + scales * 2**-10)).all(), "half of the last bit at most"
        assert torch.allclose(scales, x.float().abs().amax(-1, keepdim=True) / 448, rtol=1e-6)


def check_thin(
    kernels: Any, device: str, dtype: torch.dtype, shape: tuple[int, int, int], in_fp8: bool, bias: bool
) -> None:
    """Twice: what is counted between programs must be forgotten again."""
    rows, columns, inner = shape
    generator = torch.Generator().manual_seed(rows * columns)
    x, w = (torch.randn(each, inner, generator=generator).to(device, dtype) for each in (rows, columns))
    b = torch.randn(columns, generator=generator).to(device, dtype) if bias else None
    for _ in range(2):
        if in_fp8:
            (x8, x_scale), (w8, scale) = in_8_bits_plainly(x), in_8_bits_plainly(w)
            found = kernels.thin(x8, x_scale, w8, scale, b, dtype)
            expected = (x8.double() * x_scale) @ (w8.double() * scale).T
        else:
            w8, scale = Int8Weight.rounded(w)
            found = kernels.thin(x, None, w8, scale, b, dtype)
            expected = x.double() @ (w8.double() * scale).T
        expected += 0.0 if b is None else b.double()
        assert found.dtype == dtype
        assert close(found, expected, dtype)


def check_widen(kernels: Any, device: str, dtype: torch.dtype, columns: int, inner: int) -> None:
    w = torch.randn(columns, inner, generator=torch.Generator().manual_seed(inner)).to(device)
    w8, scale = Int8Weight.rounded(w)
    assert torch.equal(kernels.widen(w8, scale, dtype), (w8 * scale).to(dtype))


def check_draw(drawing: Any, device: str, dtype: torch.dtype, rows: int, vocabulary: int) -> None:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)).to(device, dtype)
    temperatures = [0.0, 0.5, 1.0, 3.0]
    draws = [
        Draw(SamplingParams(temperature=temperatures[row % 4]), counter.name_key(row, "0"), [0] * (row + 1), 1)
        for row in range(rows)
    ]
    numbers = torch.from_numpy(Draws(draws).columns()).to(device)
    temperature = numbers[0].view(torch.float32)
    found = drawing.draw(logits, temperature, numbers[4:6], numbers[6])
    assert torch.equal(found, draw_plainly(logits, temperature, numbers[4:6], numbers[6]))
    logits[:, 1:] = math.nan
    assert (drawing.draw(logits, temperature, numbers[4:6], numbers[6]) == 0).all(), "what is no number is not drawn"


def check_limit(drawing: Any, device: str, dtype: torch.dtype, rows: int, vocabulary: int, seed: int) -> None:
    """What is left is the beginning of all tokens in their order, those of equal logits by place: as long as the
    definitions of min-p, top-k and top-p make it, give or take a last bit of a probability.
    """
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    for number in range(rows):
        row = logits[number]
        kind = chance.choice(["as they are", "equal ones", "near 0", "few", "all equal", "large"])
        if kind == "equal ones":
            row.round_()
        elif kind == "near 0":
            row[::2], row[1::4] = 0.0, -0.0
        elif kind == "few":
            row[torch.rand(vocabulary, generator=generator) < 0.9] = -math.inf
            row[::7] = math.nan
            row[chance.randrange(vocabulary)] = 1.0
        elif kind == "all equal":
            row[:] = chance.choice([-1.0, 0.0, 2.0])
        elif kind == "large":
            row *= 1e4
    logits = logits.to(device, dtype)
    params = [
        SamplingParams(
            temperature=chance.choice([0, 0.3, 1.0, 2.0]),
            top_k=chance.choice([0, 0, 1, 2, 20, vocabulary, chance.randint(1, vocabulary)]),
            top_p=chance.choice([1.0, 1.0, 0.05, 0.5, 0.95, 0.9999, chance.uniform(0.01, 1)]),
            min_p=chance.choice([0.0, 0.0, 0.0, 1.0, 0.01, chance.random()]),
        )
        for _ in range(rows)
    ]
    numbers = torch.from_numpy(Draws([Draw(one, (0, 0), [0], 1) for one in params]).columns()).to(device)
    temperature, min_p, top_p = numbers[:3].view(torch.float32)
    lowest, last = drawing.limit(logits, temperature, min_p, top_p, numbers[3])
    place = torch.arange(vocabulary, device=device)
    x = logits.float().nan_to_num(-math.inf, math.inf, -math.inf)
    kept = (x > lowest[:, None]) | ((x == lowest[:, None]) & (place <= last[:, None]))
    for row, one in enumerate(params):
        order = x[row].cpu().sort(descending=True, stable=True).indices
        count = int(kept[row].sum())
        assert kept[row].cpu()[order[:count]].all(), "the likeliest come first, and of equal ones the first"
        fewest, most = (left(x[row].cpu().double()[order], one, more) for more in (-1e-5, 1e-5))
        assert fewest <= count <= most, (one, fewest, count, most)


def left(sorted_V: Tensor, params: SamplingParams, more: float) -> int:
    """How many tokens are, by definition, and if shares were so much larger."""
    if params.temperature == 0:
        return len(sorted_V)
    relative = (sorted_V - sorted_V[0]) / params.temperature
    relative[sorted_V == sorted_V[0]] = 0
    count = int((relative.exp() >= params.min_p * (1 - more)).sum()) if params.min_p else len(sorted_V)
    count = min(count, params.top_k or count)
    if params.top_p < 1:
        shares = relative[:count].softmax(0)
        count = max(int((shares.cumsum(0) - shares < params.top_p + more).sum()), 1)
    return count


def random_case(device: str, dtype: torch.dtype, seed: int, *, longest: int, answers: bool) -> Case:
    choice = random.Random(seed)
    lengths = [choice.randint(1, longest) for _ in range(choice.randint(1, 6))]
    return Case(
        device,
        dtype,
        heads=choice.choice([1, 2, 3]),
        shared=choice.choice([1, 2, 3, 4, 7]),
        dim=choice.choice([8, 12, 16, 64, 80, 128]),
        page=choice.choice([8, 16, 32, 64]),
        lengths=lengths,
        queries=[1 if answers else choice.randint(1, length) for length in lengths],
        seed=seed,
    )
