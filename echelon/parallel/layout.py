"""How ranks are arranged: pipeline stages, each a grid of named dimensions. Everything else derives from here.

The ranks of a stage follow those of the stage before it, and are counted with `tp` innermost, then `sp`, `cp` and `dp`:
so `tp`, which talks most, finds its ranks side by side on one node, and `dp` and `pp` reach across nodes. A view is a
set of groups over these ranks: a dimension, or several folded into one.

    layout = Layout(dp=-1, tp=2)      # plain data; -1 is the rest
    print(layout.resolve(8))          # draws the grid
    grid = layout.build()             # on every rank, after init_process_group
    grid.mesh("dp"), grid.mesh("tp")  # DeviceMeshes
"""

from __future__ import annotations

import itertools
import math
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from echelon.comm.choose import choose
from echelon.comm.routes import Road, read_choice
from echelon.comm.torch_compat import choose_gpu, fold, join, mesh_of, stay_out_of, world_mesh
from echelon.parallel.drawing import drawing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The dimensions of a stage's grid, from outer to inner. dp is replicate × shard.
DIMENSIONS = ("replicate", "shard", "cp", "sp", "tp")
# What several dimensions are folded into. The ranks of `data` see different data and hold the same weights: over them
# gradients are summed. `ep` is one group in which each rank holds other experts. `shard_cp` is what is sharded over.
FOLDED = {
    "dp": ("replicate", "shard"),
    "ep": ("replicate", "shard", "cp"),
    "data": ("replicate", "shard", "cp", "sp"),
    "shard_cp": ("shard", "cp", "sp"),
}
_IN_A_STAGE = {name: (name,) for name in DIMENSIONS} | FOLDED
VIEWS = (*_IN_A_STAGE, "pp", "world")
HYBRID = ("replicate", "shard_cp")  # the dimensions of the one mesh that has two
_DEGREES = ("pp", "dp", "cp", "sp", "tp")

Tiles = int | tuple[int, int]  # of an image: rows of tiles, or rows and columns


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The grid of one pipeline stage, but for `dp`, which all stages share."""

    cp: int = 1
    sp: Tiles = 1
    tp: int = 1

    def __post_init__(self) -> None:
        _fix_tiles(self)
        _check_degrees(self, asdict(self))

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles that an image is cut into."""
        return self.sp if isinstance(self.sp, tuple) else (self.sp, 1)

    @property
    def size(self) -> int:
        """Ranks for each of dp."""
        return self.cp * math.prod(self.tiles) * self.tp

    def __repr__(self) -> str:
        return _written(self)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Equal stages by their degrees, or `stages` that differ. One degree may be -1, which stands for the rest.

    `sp` is rows of tiles, or a pair: `sp=(2, 2)`, `sp=(1, 4)`.

    `replicate` splits dp for hybrid sharding: into so many replicas, each sharded over dp // replicate ranks.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    sp: Tiles = 1
    tp: int = 1
    replicate: int = 1
    stages: Sequence[Stage] | None = None

    def __post_init__(self) -> None:
        _fix_tiles(self)
        if self.stages is not None:
            object.__setattr__(self, "stages", tuple(self.stages))
            if not self.stages or (self.pp, self.cp, self.sp, self.tp) != (1, 1, 1, 1):
                raise ValueError(f"{self!r}: with stages, cp, sp and tp are each stage's own, and pp is their number")
        rest = [name for name in _DEGREES if getattr(self, name) == -1]
        if len(rest) > 1:
            raise ValueError(f"{self!r}: only one degree can be the rest, but {_listed(rest, 'and')} are -1")
        given = {name: getattr(self, name) for name in (*_DEGREES, "replicate") if name not in rest}
        _check_degrees(self, given)
        if self.dp != -1 and self.dp % self.replicate:
            fitting = _listed([str(degree) for degree in _divisors(self.dp)], "or")
            raise ValueError(f"{self!r}: dp is replicate × shard, so replicate must divide it: choose {fitting}")

    def resolve(self, ranks: int) -> Layout:
        """This layout for so many ranks, without -1; where it does not fit, the error says what would."""
        if self._rest is None:
            if self.size == ranks:
                return self
            are = "1 is" if ranks == 1 else f"{ranks} are"
            raise ValueError(f"{self!r} needs {_ranks(self.size)}, but {are} running: {_advice(self, ranks)}")
        least = self._with({self._rest: self.replicate if self._rest == "dp" else 1})
        if ranks % least.size == 0:
            return self._with({self._rest: getattr(least, self._rest) * (ranks // least.size)})
        raise ValueError(
            f"{self!r} does not fit {_ranks(ranks)}: all but {self._rest} makes {least.size}, "
            f"which does not divide {ranks}: {_advice(self, ranks)}"
        )

    @property
    def size(self) -> int:
        """Ranks in all."""
        if self._rest is not None:
            raise ValueError(f"{self!r} leaves {self._rest} to the number of ranks: call resolve(ranks) first")
        return self.dp * sum(stage.size for stage in self.grids)

    @property
    def shard(self) -> int:
        """What is left of dp inside a replica."""
        return self.dp // self.replicate

    @property
    def depth(self) -> int:
        """Pipeline stages (of a rank's own; with chunks each is several)."""
        return len(self.grids)

    @property
    def is_tiled(self) -> bool:
        """Whether any stage cuts images into tiles."""
        return any(stage.tiles != (1, 1) for stage in self.grids)

    @property
    def grids(self) -> tuple[Stage, ...]:
        """The stages, written out."""
        if self.stages is not None:
            return tuple(self.stages)
        return (Stage(cp=self.cp, sp=self.sp, tp=self.tp),) * self.pp

    def groups(self, view: str) -> list[list[int]]:
        """The groups of a view: together they hold each rank once.

        A group of `pp` has one rank of each stage; of stages that differ, all ranks that differ in what these do.
        """
        if view not in VIEWS:
            raise ValueError(f"there is no view {view!r} with groups: there are {_listed(VIEWS, 'and')}")
        if view == "world":
            return [list(range(self.size))]
        blocks = self.blocks()
        if view == "pp":
            apart = [name for name in DIMENSIONS if len({getattr(stage, name, None) for stage in self.grids}) > 1]
            groups: list[list[int]] = np.concatenate([_rows(block, apart) for block in blocks], axis=1).tolist()
            return groups
        return [group for block in blocks for group in _rows(block, _IN_A_STAGE[view]).tolist()]

    def group(self, view: str, rank: int) -> list[int]:
        """The group of a view that a rank belongs to."""
        self.coordinates(rank)
        return next(group for group in self.groups(view) if rank in group)

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place in each dimension; `pp` is the number of its stage."""
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} in {self!r}: it has {self.size}, counted from 0")
        stage, inside = 0, rank
        while inside >= self.dp * self.grids[stage].size:
            inside -= self.dp * self.grids[stage].size
            stage += 1
        place = np.unravel_index(inside, self._shape(self.grids[stage]))
        found = {"pp": stage} | {name: int(at) for name, at in zip(DIMENSIONS, place, strict=True)}
        return found | {"dp": found["replicate"] * self.shard + found["shard"]}

    def blocks(self) -> list[NDArray[np.int64]]:
        """The ranks of each stage, with an axis for each of DIMENSIONS."""
        numbers, shapes = np.arange(self.size), [self._shape(stage) for stage in self.grids]
        ends = itertools.accumulate(math.prod(shape) for shape in shapes)
        return [numbers[end - math.prod(shape) : end].reshape(shape) for shape, end in zip(shapes, ends, strict=True)]

    def build(self, device_type: str = "cpu", routes: Mapping[str, str] | None = None) -> Grid:
        """The meshes; called by all ranks, after `init_process_group`.

        `routes` choose roads by view: `{"tp": "mpi+shared", "data": "all_reduce=gloo"}`.
        """
        import torch.distributed as dist

        chosen = {view: _choice(view, text) for view, text in (routes or {}).items()}

        layout = self.resolve(dist.get_world_size())
        if device_type == "cuda":
            choose_gpu()
        hosts: list[Any] = [None] * layout.size
        dist.all_gather_object(hosts, socket.gethostname())
        if dist.get_rank() == 0 and (advice := across_nodes(layout, hosts)):
            warnings.warn(advice, stacklevel=2)
        meshes = _meshes(layout, dist.get_rank(), device_type)
        for view, roads in chosen.items():
            choose(meshes[view].get_group(), roads)
        return Grid(layout, dist.get_rank(), meshes)

    def draw(self, ranks_per_node: int | None = None) -> str:
        """The grid as text; with `ranks_per_node`, lines where a node begins."""
        return drawing(self, ranks_per_node)

    def __str__(self) -> str:
        return repr(self) if self._rest else self.draw()

    def __repr__(self) -> str:
        return _written(self)

    def _shape(self, stage: Stage) -> tuple[int, ...]:
        return self.replicate, self.shard, stage.cp, math.prod(stage.tiles), stage.tp

    def _with(self, degrees: Mapping[str, Any]) -> Layout:
        return replace(self, **degrees)

    @property
    def _rest(self) -> str | None:
        return next((name for name in _DEGREES if getattr(self, name) == -1), None)


@dataclass(frozen=True)
class Grid:
    """A layout as one rank sees it, with its meshes by the name of the view."""

    layout: Layout
    rank: int
    meshes: Mapping[str, DeviceMesh]

    @property
    def stage(self) -> int:
        """The number of this rank's pipeline stage."""
        return self.layout.coordinates(self.rank)["pp"]

    def mesh(self, view: str) -> DeviceMesh:
        """The view's mesh, of one dimension that bears its name; `hybrid` has two, replicate and shard_cp."""
        if view not in self.meshes:
            raise ValueError(f"there is no view {view!r}: there are {_listed(list(self.meshes), 'and')}")
        return self.meshes[view]


def _choice(view: str, text: str) -> dict[str, Road]:
    if view not in VIEWS:
        raise ValueError(f"there is no view {view!r} to choose roads for: there are {_listed(VIEWS, 'and')}")
    return read_choice(text)


def across_nodes(layout: Layout, hosts: Sequence[str]) -> str:
    """What is wrong, and what to do, if a group of tp lies on several of the ranks' hosts; else nothing."""
    crossing = [group for group in layout.groups("tp") if len({hosts[rank] for rank in group}) > 1]
    if not crossing:
        return ""
    first = {host: [str(rank) for rank in crossing[0] if hosts[rank] == host] for host in hosts}
    places = "; ".join(f"rank {', '.join(ranks)} on {host}" for host, ranks in first.items() if ranks)
    problem = f"{layout!r} lets tensor parallelism cross nodes ({places}), and every layer waits for its messages: "
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    if len(runs) > len(set(hosts)):
        return problem + "let the launcher fill one node with ranks before it goes on to the next"
    fitting = [str(degree) for degree in _divisors(math.gcd(*runs))]
    return f"{problem}choose tp={_listed(fitting, 'or')}, and let dp, cp or pp cross nodes instead"


def _meshes(layout: Layout, rank: int, device_type: str) -> dict[str, DeviceMesh]:
    """A group for each view, even where two hold the same ranks: a record then shows who communicated, whatever the
    degrees. The meshes of a stage are parts of one, as FSDP2 and tensor parallelism together demand.
    """
    meshes: dict[str, DeviceMesh] = {}
    for block in layout.blocks():
        if rank in block:
            whole = mesh_of(device_type, block.tolist(), DIMENSIONS)
            meshes = {name: whole[name] for name in DIMENSIONS}
            meshes |= {name: fold(whole[parts], name) for name, parts in FOLDED.items()}
            meshes["hybrid"] = join([meshes[name] for name in HYBRID])
        else:
            for parts in _IN_A_STAGE.values():
                stay_out_of(_rows(block, parts).tolist())
    own = layout.group("pp", rank)
    for group in layout.groups("pp"):
        if group == own:
            meshes["pp"] = mesh_of(device_type, group, ("pp",))
        else:
            stay_out_of([group])
    return meshes | {"world": world_mesh(device_type)}


def _rows(block: NDArray[np.int64], inner: Sequence[str]) -> NDArray[np.int64]:
    """The ranks of a stage, in rows of those that differ in the `inner` dimensions alone."""
    axes = [DIMENSIONS.index(name) for name in inner]
    degree = math.prod(block.shape[axis] for axis in axes)
    return np.moveaxis(block, axes, range(-len(axes), 0)).reshape(-1, degree)


def _advice(layout: Layout, ranks: int) -> str:
    start = f"start with -n {layout.size}, or " if layout._rest is None else ""
    fitting = [repr(other) for other in _fitting(layout, ranks)]
    if layout.stages is None:
        return f"{start}choose degrees whose product is {ranks}, such as {_listed(fitting, 'or')}"
    if fitting:
        return f"{start}choose {fitting[0]}"
    return f"{start or 'start '}with a multiple of {sum(stage.size for stage in layout.stages)}, which the stages need"


def _fitting(layout: Layout, ranks: int) -> list[Layout]:
    """The layouts for so many ranks that are nearest to this one; those that change dp alone come first."""
    if isinstance(layout.sp, tuple):
        layout = replace(layout, sp=math.prod(layout.sp))
    names = [name for name in _DEGREES if name == "dp" or getattr(layout, name) != 1]
    each = 1 if layout.stages is None else sum(stage.size for stage in layout.stages)

    def distance(degrees: tuple[int, ...]) -> tuple[int, int, float]:
        pairs = {name: (getattr(layout, name), new) for name, new in zip(names, degrees, strict=True)}
        changes = {name: abs(math.log(new / old)) for name, (old, new) in pairs.items() if old not in (-1, new)}
        return len(changes.keys() - {"dp"}), len(changes), sum(changes.values())

    ways = _factorings(ranks // each, len(names)) if ranks % each == 0 else []
    chosen = [dict(zip(names, degrees, strict=True)) for degrees in sorted(ways, key=distance)[:3]]
    return [layout._with(way | {"replicate": math.gcd(layout.replicate, way["dp"])}) for way in chosen]


def _fix_tiles(owner: Stage | Layout) -> None:
    """A pair is a tuple, and one of rows alone a number, so that equal grids are equal."""
    if not isinstance(owner.sp, int):
        if len(owner.sp) != 2:
            raise ValueError(f"sp={owner.sp}: an image is cut into rows, or into rows and columns: sp=4, or sp=(2, 2)")
        rows, columns = owner.sp
        object.__setattr__(owner, "sp", rows if columns == 1 else (rows, columns))


def _check_degrees(owner: Stage | Layout, degrees: Mapping[str, Any]) -> None:
    for name, degree in degrees.items():
        if (min(degree) if isinstance(degree, tuple) else degree) < 1:
            may = ", or -1 for the rest" if name in _DEGREES and isinstance(owner, Layout) else ""
            raise ValueError(f"{owner!r}: {name} counts ranks, so it is 1 or more{may}")


def _factorings(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many."""
    if count == 1:
        yield (number,)
    else:
        for first in _divisors(number):
            for others in _factorings(number // first, count - 1):
                yield (first, *others)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _listed(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _written(value: Stage | Layout) -> str:
    """As it is written in a script: what was left out is left out."""
    given = [(field.name, getattr(value, field.name)) for field in fields(value)]
    text = ", ".join(f"{name}={list(of) if name == 'stages' else of}" for name, of in given if of not in (1, None))
    return f"{type(value).__name__}({text})"
