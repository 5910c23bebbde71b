"""Everything that reaches into torch, or depends on its version.

`register` runs inside every `import torch` on a machine where Echelon is installed (PyTorch's `torch.backends` entry
point): it is quick, starts nothing, and cannot fail. (Nor does this module import torch before that: `import echelon`
may come first.) What it changes in `torch.distributed`:
- the backend `echelon` is known; the wheels of PyTorch refuse `"mpi"`, so there that name means `echelon` too;
- in a process that an MPI launcher started, `env://` needs no MASTER_ADDR: the ranks agree on one through MPI;
- `monitored_barrier` and `split_group`, which PyTorch keeps for Gloo and for GPUs, accept Echelon's groups;
- a DeviceMesh tells which group serves which of its dimensions;
- a plain synchronous `all_reduce` goes straight to Echelon's group: PyTorch's way there, through an options object,
  costs more than the operation itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from echelon.launch.identity import export, identity, show_output_by_line, take_cores

BACKEND = "echelon"
_group_types: set[type] = set()  # EchelonGroup, once there is one
dimensions: dict[str, str] = {}  # the name of a mesh's dimension, by that of its group
# The operations by which PyTorch's own groups go through its dispatcher.
_DISPATCHED = {
    "all_reduce": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "reduce": "reduce_",
    "broadcast": "broadcast_",
    "all_gather": "allgather_",
    "all_gather_single": "_allgather_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
}
_COALESCED = {
    "all_gather": "allgather_coalesced_",
    "all_gather_single": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single": "reduce_scatter_tensor_coalesced_",
}


def register() -> None:
    """Make the backend known to `torch.distributed`; harmless when repeated."""
    try:
        export()
        show_output_by_line()
        take_cores()
        import torch

        if torch.distributed.is_available() and not hasattr(torch.distributed.Backend, BACKEND.upper()):
            _register()
    except Exception as error:  # `import torch` must survive whatever is wrong here
        warnings.warn(f"the backend {BACKEND!r} is not available: {type(error).__name__}: {error}", stacklevel=2)


def _register() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers

    dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])
    if not dist.is_mpi_available():
        dist.Backend.__new__ = _with_mpi_alias(dist.Backend.__new__)  # type: ignore[method-assign]
        _replace("is_mpi_available", _is_mpi_available, dist, distributed_c10d)
    _replace("all_reduce", _with_short_way(distributed_c10d.all_reduce), dist, distributed_c10d)
    handlers["env"] = _with_mpi_rendezvous(handlers["env"])
    _replace(
        "monitored_barrier",
        _for_echelon(distributed_c10d.monitored_barrier, _monitored_barrier),
        dist,
        distributed_c10d,
    )
    dist.DeviceMesh.__init__ = _with_dimensions(dist.DeviceMesh.__init__)  # type: ignore[method-assign]
    _replace("split_group", _for_echelon(distributed_c10d.split_group, _split_group), dist, distributed_c10d)


def _replace(name: str, function: Callable[..., Any], *modules: Any) -> None:
    for module in modules:
        setattr(module, name, function)


def _create_group(options: Any, _backend_options: Any) -> Any:
    """Called by `init_process_group` and `new_group`, on the members of the group alone."""
    from echelon.comm.start import create_group

    group = create_group(options)
    _group_types.add(type(group))
    return group


def _with_mpi_alias(new: Callable[..., str]) -> Callable[..., str]:
    """`Backend("mpi")` is how PyTorch reads a backend's name, before its own branch for MPI."""

    @functools.wraps(new)
    def __new__(cls: type, name: str) -> str:
        return BACKEND if isinstance(name, str) and name.lower() == "mpi" else new(cls, name)

    return __new__


def _is_mpi_available() -> bool:
    """Whether `"mpi"` can be used: in a process that an MPI launcher started."""
    return identity().in_mpi_world


def _with_mpi_rendezvous(env: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The `env://` handler, for ranks of an MPI world too."""

    @functools.wraps(env)
    def handler(url: str, **kwargs: Any) -> Iterator[Any]:
        if "MASTER_ADDR" in os.environ or not identity().in_mpi_world:
            return env(url, **kwargs)
        from echelon.comm.start import rendezvous

        given = {
            key: int(values[0])
            for key, values in parse_qs(urlparse(url).query).items()
            if key in ("rank", "world_size")
        }
        return rendezvous(given, kwargs.get("timeout") or torch_default_timeout())

    return handler


def newest(*names: str) -> Callable[..., Any]:
    """The first of these that this `torch.distributed` has: torch 2.13 renamed some, and warns of the old."""
    import torch.distributed as dist

    found: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


@contextlib.contextmanager
def known_to_torch(*groups: Any) -> Iterator[None]:
    """In here messages may be sent in groups that `new_group` has not made: PyTorch has a table of those it knows."""
    from torch.distributed.distributed_c10d import _world

    for group in groups:
        _world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    try:
        yield
    finally:
        for group in groups:
            _world.pg_group_ranks.pop(group, None)


def torch_default_timeout() -> timedelta:
    from torch.distributed import default_pg_timeout

    return default_pg_timeout


def _with_dimensions(init: Callable[..., None]) -> Callable[..., None]:
    """A mesh over all ranks takes the world's group as it is, which then does not know the dimension's name."""

    @functools.wraps(init)
    def __init__(mesh: Any, *args: Any, **kwargs: Any) -> None:
        init(mesh, *args, **kwargs)
        dimensions.update(zip(getattr(mesh, "_dim_group_names", ()), mesh.mesh_dim_names or (), strict=False))

    return __init__


def choose_gpu() -> None:
    """Choose this rank's GPU, if nobody has: as a mesh does, but ranks may share one where a node has fewer."""
    import torch

    if not torch.cuda.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def gpu_to_be() -> str:
    """Which GPU this rank has, or would choose, as the driver counts them on its node; `-` if there is none.

    Told without starting CUDA.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        return "-"
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else int(os.environ.get("LOCAL_RANK", "0"))
    return str(torch.cuda._parse_visible_devices()[index % count])


def mesh_of(device_type: str, ranks: Any, names: tuple[str, ...]) -> Any:
    """A mesh that makes a group of its own for every dimension, called by the ranks in it.

    PyTorch would take the world's group for a dimension over all ranks, whichever, and its records could not be told
    from others.
    """
    import torch.distributed as dist

    override = ((dist.get_backend(), None),) * len(names)
    return dist.DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=override)


def fold(mesh: Any, name: str) -> Any:
    """The dimensions of a mesh as one, with a group of its own."""
    import torch.distributed as dist

    return mesh._flatten(name, backend_override=dist.get_backend())


def join(meshes: list[Any]) -> Any:
    """Parts of one mesh as dimensions of a new one, with the groups they have."""
    import torch.distributed as dist

    return dist.DeviceMesh._concatenate(meshes)


def world_mesh(device_type: str) -> Any:
    """A mesh over all ranks, of the world's own group."""
    import torch.distributed as dist

    return dist.DeviceMesh(device_type, list(range(dist.get_world_size())), mesh_dim_names=("world",))


def stay_out_of(groups: list[list[int]]) -> None:
    """What a rank does while others make these groups for a mesh: PyTorch names a group by the calls before it."""
    import torch.distributed as dist

    for ranks in groups:
        dist.new_group(ranks)


def _with_short_way(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`all_reduce`, with a shorter way for what needs none of PyTorch's detours: subclasses of tensors, torch-function
    modes, coalescing, complex numbers as pairs. (What PyTorch does with the function itself, in coalescing and in
    Dynamo, it does with whatever bears the name.)
    """
    from torch import _C, Tensor
    from torch.distributed import ReduceOp
    from torch.distributed.distributed_c10d import _world

    function_modes, dispatch_modes = _C._len_torch_function_stack, _C._len_torch_dispatch_stack

    @functools.wraps(theirs)
    def all_reduce(tensor: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        actual: Any = _world.default_pg if group is None else group
        if (
            type(actual) in _group_types
            and not async_op
            and type(tensor) is Tensor
            and not _world.pg_coalesce_state
            and not function_modes()
            and not dispatch_modes()
            and actual.all_reduce_at_once(tensor, op)
        ):
            return None
        return theirs(tensor, op, group, async_op)

    return all_reduce


def watched_by_modes() -> bool:
    """Whether any of PyTorch's dispatch modes is on."""
    from torch._C import _len_torch_dispatch_stack

    return bool(_len_torch_dispatch_stack())


def announce(operation: str, several: bool) -> None:
    """Tell PyTorch's CommDebugMode of a call: what PyTorch's own groups do passes the dispatcher, ours does not."""
    import torch
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    names = _COALESCED if several else _DISPATCHED
    if operation in names:
        call = _Announced(getattr(torch.ops.c10d, names[operation]))
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, CommDebugMode):
                mode.__torch_dispatch__(call, ())


class _Announced:
    """What a dispatch mode takes for an operation that it is asked to carry out."""

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self) -> None:
        """The group does it."""

    def __str__(self) -> str:
        return str(self._overloadpacket)


def _for_echelon(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` for Echelon's groups, `theirs` for all others."""

    @functools.wraps(theirs)
    def function(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        group = kwargs.pop("parent_pg", kwargs.pop("group", group))
        actual = group if group is not None else (dist.group.WORLD if dist.is_initialized() else None)
        if type(actual).__name__ == "EchelonGroup":
            return ours(actual, *args, **kwargs)
        return theirs(group, *args, **kwargs)

    return function


def _monitored_barrier(group: Any, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
    if timeout is None:
        timeout = torch_default_timeout()
    elif not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    group.monitored_barrier(timeout, wait_all_ranks)


def _split_group(
    parent: Any,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """PyTorch's `split_group`, whose ranks are those within `parent`; only the members of a split make its group."""
    import torch.distributed as dist

    if not split_ranks:
        raise ValueError("split_ranks must name the ranks of at least one split")
    mine = [ranks for ranks in split_ranks if parent.rank() in ranks]
    if len(mine) > 1 or any(not ranks or len(set(ranks)) != len(ranks) for ranks in split_ranks):
        raise ValueError(f"splits must not be empty, overlap or repeat a rank, but are {split_ranks}")
    if not mine:
        return None
    world = dist.get_process_group_ranks(parent)
    return dist.new_group(
        [world[rank] for rank in sorted(mine[0])], timeout, use_local_synchronization=True, group_desc=group_desc
    )


def local_tensor(tensor: Any) -> Any:
    """What this rank holds of a tensor: a DTensor's local tensor itself (no view of it), or the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is under way has computed all its gradients."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def sum_gradients(module: Any) -> None:
    """Let one module of FSDP2 sum gradients over the ranks, not average, and count a gradient that a rank lacks as
    zeros (which torch 2.11 cannot: there every rank must use the same parameters).
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)


def reduce_kept_gradients(model: Any) -> None:
    """Let FSDP2 sum over the ranks what its modules' gradients have become without synchronization."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        return
    root: Any = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            group.post_backward()
    root._root_post_backward_final_callback()


def lengths_of_files(metadata: Any) -> dict[str, int]:
    """How long the files of a DCP checkpoint are at least, by their names, from what its metadata says of them."""
    lengths: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        lengths[stored.relative_path] = max(lengths.get(stored.relative_path, 0), stored.offset + stored.length)
    return lengths


def default_store() -> Any:
    """Where the ranks of the world tell each other things without a collective."""
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_default_store()
