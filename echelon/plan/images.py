"""What a model of images keeps from forward to backward, and what tiles of images send each other: a pass without
memory, over groups that only count.

Both follow from shapes, through whatever functions a model calls; so instead of formulas for each of them, this
computes the model as a rank would (see parallel/spatial), on the meta device, where nothing is computed but shapes, and
with process groups that send nothing and note what they were asked to.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.comm.torch_compat import known_to_torch
from echelon.models.chain import Edge, Given, Value
from echelon.parallel import batchnorm, spatial
from echelon.parallel.apply import DTYPES, Strategies
from echelon.parallel.layout import Layout
from echelon.parallel.pipeline.actions import Direction
from echelon.parallel.pipeline.mail import Kinds, Route, kinds_of, parts_of, shown
from echelon.parallel.pipeline.part import Part, in_dtype
from echelon.parallel.pipeline.partition import linked
from echelon.parallel.spatial.tiles import Ground, plain
from echelon.parallel.tiling import STATISTICS, TILES, seat

Traffic = Counter[tuple[str, str]]  # bytes by view and operation
Key = tuple[int, Direction]  # a stage, and the way that a microbatch goes


@dataclass(frozen=True)
class Passes:
    """Of one rank: for each stage that it computes, in each direction, what one microbatch sends and keeps; and what
    goes from stage to stage.
    """

    sent: Mapping[Key, Traffic]
    kept: Mapping[Key, int]  # bytes, from forward to backward
    kinds: Mapping[Edge, Kinds]


@dataclass(frozen=True)
class _Pass:
    """Of one stage and tile."""

    sent: Traffic
    kept: int
    gives: Mapping[Edge, Kinds]


class Images:
    """Of a plain model on the meta device, for microbatches of one rank of dp like the `example`. What was computed for
    one rank serves those that have the same tile.
    """

    def __init__(self, model: Any, layout: Layout, strategies: Strategies, example: Given | None) -> None:
        if example is None:
            raise ValueError(
                "what is kept, and what tiles send, depends on the images: give an example of a microbatch"
            )
        dtype = DTYPES[strategies.precision]
        self._model = copy.deepcopy(model).to(dtype).train()
        spatial.name_modules(self._model)
        self._given, self._layout, self._element = in_dtype(example, dtype), layout, dtype.itemsize
        self._averages_all = strategies.global_batchnorm and layout.dp > 1
        self._passes: dict[tuple[int, int, bool], _Pass] = {}  # by stage and tile, and whether it went back

    def passes(self, rank: int, part: Part) -> Passes:
        """Of a rank, which has this part of the model."""
        if self._layout.depth == 1:
            alone = self._whole(seat(self._layout, rank, "down"))
            return Passes({(0, "down"): alone.sent}, {(0, "down"): alone.kept}, {})
        found = {key: self._stage(key[0], self._seat(rank, *key, part), part) for key in part.forwards}
        (_, direction), *_ = part.forwards
        kinds: dict[Edge, Kinds] = {}
        for stage in range(len(part.spans) - 1):
            kinds |= self._stage(stage, self._seat(rank, stage, direction, part), part, back=False).gives
        sent, kept = ({key: getattr(each, name) for key, each in found.items()} for name in ("sent", "kept"))
        return Passes(sent, kept, kinds)

    def _seat(self, rank: int, stage: int, direction: Direction, part: Part) -> int:
        """Which tile of a stage: where stages have crews of their own, and the rank is in none of this one, the first;
        else it has a pipeline of its own tile.
        """
        if part.crews.ranks == len(part.crews.tiles):
            return seat(self._layout, rank, direction)
        inside, crew = self._layout.group("pp", rank).index(rank), part.crews.crew(stage, direction)
        return crew.ranks.index(inside) if inside in crew.ranks else 0

    def _whole(self, which: int) -> _Pass:
        """Of a model that is not cut into stages."""
        if (0, which, True) not in self._passes:
            sent: Traffic = Counter()
            with self._ground(self._layout.grids[0].tiles, which, sent, [self._model]) as ground:
                with _keeping(self._model) as kept:
                    given = self._given if ground is None else spatial.cut_images(self._given, ground)
                    out = self._model(**given) if isinstance(given, Mapping) else self._model(*given)
                    out = out if ground is None else spatial.leaving(out, ground)
                out.backward(torch.empty_like(out))
            self._passes[0, which, True] = _Pass(sent, sum(kept.values()), {})
        return self._passes[0, which, True]

    def _stage(self, stage: int, which: int, part: Part, *, back: bool = True) -> _Pass:
        for key in ((stage, which, True), (stage, which, False)):
            if key in self._passes and key[2] >= back:
                return self._passes[key]
        sent: Traffic = Counter()
        chain, span = linked(self._model), part.spans[stage]
        modules = dict(chain.named_modules())
        computed = [modules[name] for link in span for name in chain.parts(link) if name in modules]
        tiles = self._layout.grids[stage % self._layout.depth].tiles
        received = {edge: self._received(edge, which, part) for edge in chain.crossing(span)[0]}
        with self._ground(tiles, which, sent, computed) as ground:
            given = spatial.cut_images(self._given, ground) if stage == 0 and ground is not None else self._given
            gives: dict[Edge, Kinds] = {}
            with _keeping(chain) as kept:
                out = chain.compute(span, given, {edge: shown(*each, ground) for edge, each in received.items()})
                if stage == len(part.spans) - 1:
                    outputs: list[Any] = [spatial.leaving(out, ground) if ground is not None else out]
                else:
                    outputs = [plain(x) for value in out.values() for x in parts_of(value)]
                    crew = part.crews.crew(stage)
                    gives = {edge: kinds_of(value, crew, ground is not None) for edge, value in out.items()}
            if back:
                outputs = [x for x in outputs if x.requires_grad]
                torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
        noted = self._noted(stage, part) if back and ground is None else 0
        return self._passes.setdefault((stage, which, back), _Pass(sent, sum(kept.values()) + noted, gives))

    def _received(self, edge: Edge, which: int, part: Part) -> tuple[Value, Kinds]:
        """What an edge brings to a tile."""
        source, target = (next(n for n, span in enumerate(part.spans) if link in span) for link in edge)
        crews = part.crews.crew(source), part.crews.crew(target)
        first = which if part.crews.ranks == len(part.crews.tiles) else 0
        kinds = self._stage(source, first, part, back=False).gives[edge]
        tensors = tuple(
            torch.empty(Route(*crews).shape(kind, crews[1], which), dtype=kind.dtype, device="meta")
            for kind in kinds.tensors
        )
        for x, kind in zip(tensors, kinds.tensors, strict=True):
            x.requires_grad_(kind.has_gradient)
        return tensors if kinds.is_tuple else tensors[0], kinds

    def _noted(self, stage: int, part: Part) -> int:
        """Where microbatches go both ways, PyTorch's own norms note what they see of each, and keep that, too."""
        if not part.is_bidirectional or self._averages_all:
            return 0
        norms = next(each.norms for (of, _), each in zip(part.forwards, part.passes, strict=True) if of == stage)
        features: int = sum(norm.num_features for norm in norms)
        return 2 * features * self._element

    @contextmanager
    def _ground(
        self, tiles: tuple[int, int], which: int, sent: Traffic, computed: Sequence[nn.Module]
    ) -> Iterator[Ground | None]:
        """Of one of those who share images, if they are shared; it notes what is sent while these are computed."""
        if tiles == (1, 1):
            for module in computed if self._averages_all else ():
                batchnorm.over(module, _Counting(0, self._layout.dp, "dp", sent))
            yield None
            return
        rows, columns = tiles
        lines = [
            _Counting(place, count, TILES, sent) if count > 1 else None
            for place, count in zip(divmod(which, columns), tiles, strict=True)
        ]
        everyone = _Counting(which, rows * columns, TILES, sent)
        over = everyone
        if self._averages_all:
            over = _Counting(which, rows * columns * self._layout.dp, STATISTICS, sent)
        with known_to_torch(*(line for line in lines if line is not None)):
            yield Ground((lines[0], lines[1]), everyone, over)


class _Done(dist.Work):
    """There was nothing to wait for."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Counting(dist.ProcessGroup):
    """Sends nothing, and counts the payload of what it is asked to send, as the recorder does."""

    def __init__(self, rank: int, size: int, view: str, sent: Traffic) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._view, self._sent = view, sent

    def _note(self, operation: str, *tensors: Tensor) -> _Done:
        self._sent[self._view, operation] += sum(x.numel() * x.element_size() for x in tensors)
        return _Done()

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> _Done:  # type: ignore[override]
        return self._note("all_reduce", *tensors)

    def allgather(self, outputs: list[list[Tensor]], _: list[Tensor], __: Any = None) -> _Done:  # type: ignore[override]
        return self._note("all_gather", *outputs[0])

    def _allgather_base(self, output: Tensor, _: Tensor, __: Any = None) -> _Done:
        return self._note("all_gather_single", output)

    all_gather_single = _allgather_base  # type: ignore[assignment]  # the same, from torch 2.13 on

    def send(self, tensors: list[Tensor], _: int, __: int = 0) -> _Done:
        return self._note("send", *tensors)

    def recv(self, _: list[Tensor], __: int, ___: int = 0) -> _Done:
        return _Done()


@contextmanager
def _keeping(model: Any) -> Iterator[Mapping[Any, int]]:
    """In here a forward pass notes the bytes of each piece of memory that it keeps for the backward pass."""
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    found: dict[Any, int] = {}
    storages = []  # as long as they live, no other has the same address

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            storages.append(storage)
            found[storage._cdata] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        yield found
