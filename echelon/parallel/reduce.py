"""Gradients brought together over the data ranks while backward still runs: what stages 0, 1 and 2 have in common.

A hook on each parameter moves its gradient into its bucket's flat tensor; a bucket that is complete is reduced in the
background, always in the same order, so that ranks agree whatever came first on each. What is still missing when
backward ends (a parameter that this rank did not use) counts as zeros. Gradients are sums: nothing is divided.

Stage 0 all-reduces, and leaves each parameter's gradient where PyTorch has it. Stages 1 and 2 reduce-scatter: of the
sum, each rank keeps the part that it will update, and the parameters of a bucket are views of one flat tensor whose
parts are gathered again after the update. They differ while gradients accumulate: stage 1 keeps them whole and
reduces once, stage 2 reduces those of every backward pass. Of the flat gradients only two are under way at a time
(and the rest's, which begins with the head and ends with the embedding).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from echelon.comm.torch_compat import at_end_of_backward, newest
from echelon.parallel.buckets import Bucket, MeshOf, buckets

SUMMED = "is_summed_over_ranks"  # a mark on gradients of stage 0


class Reducer:
    """Attached to a model as `model.gradient_reducer`."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, stage: int, is_apart: bool = False, mesh_of: MeshOf | None = None
    ) -> None:
        """`mesh_of` a parameter's name gives the ranks that hold it, where these are not those of one mesh."""
        self.stage = stage
        self.is_apart = is_apart  # whether ranks outside the mesh train models of their own
        self.group = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.mesh_of: MeshOf = mesh_of or (lambda _: mesh)
        self.buckets = buckets(model, self.mesh_of, self.ranks if stage else None)
        # one rank's gradients are the sums already
        self._sums = stage > 0 or any(bucket.mesh.size() > 1 for bucket in self.buckets)
        self.accumulating = False
        self.holding = False  # all gradients, until `finish`
        self._launched = 0  # buckets, in this backward pass
        self._under_way = False  # a backward pass whose end we shall hear of
        self._complete = False  # the sums of this step are there
        for bucket in self.buckets:
            bucket.waiting = set(bucket.places)
            if stage:
                bucket.own_weights()
            for parameter in bucket.places if self._sums else ():
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def finish(self) -> None:
        """Be sure that this step's gradients are summed: a backward pass that reached no parameter of this rank, or
        only accumulated, has left that to do.
        """
        if self._sums and not self._complete:
            self._end_backward()

    def part(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor."""
        size = len(flat) // self.ranks
        return flat[self.rank * size : (self.rank + 1) * size]

    @torch.no_grad()
    def gather_weights(self) -> None:
        """After the update of each rank's own part: all parameters on all ranks."""
        gather = newest("all_gather_single", "all_gather_into_tensor")
        works = [
            gather(bucket.weights, self.part(bucket.weights), group=self.group, async_op=True)
            for bucket in self.buckets
            if bucket.weights is not None
        ]
        for work in works:
            work.wait()

    def clear(self) -> None:
        """Forget this step's gradients."""
        self._reset()
        self._complete = False
        for bucket in self.buckets:
            bucket.flat = bucket.reduced = None
            for parameter in bucket.places:
                parameter.grad = None

    def _arrived(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if not (self.holding or (self.accumulating and self.stage < 2)):  # before no_grad, which costs more
            self._bring(bucket, parameter)

    @torch.no_grad()
    def _bring(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if not self._under_way:
            self._under_way, self._complete = True, False
            at_end_of_backward(self._end_backward)
        if self.stage > 0 and bucket.flat is None:
            self._wait_for_all_but_one()
        self._take(bucket, parameter)
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting:
            self._launch()

    @torch.no_grad()
    def _end_backward(self) -> None:
        for bucket in self.buckets[self._launched :]:
            for parameter in [each for each in bucket.places if each in bucket.waiting]:
                self._take(bucket, parameter)
            self._launch()
        for bucket in self.buckets:
            self._wait(bucket)
        self._reset()
        self._complete = True

    def _take(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if hasattr(parameter.grad, SUMMED):  # autograd has added to it in place
            raise RuntimeError(
                "a gradient was added to one that is summed over the ranks already: put all backward passes of a step "
                "but the last under `with data.accumulate(model):`, and clear with zero_grad(set_to_none=True)"
            )
        bucket.take(parameter)
        bucket.waiting.discard(parameter)

    def _launch(self) -> None:
        bucket = self.buckets[self._launched]
        self._launched += 1
        assert bucket.flat is not None
        if self.stage == 0:
            bucket.work = dist.all_reduce(bucket.flat, group=bucket.mesh.get_group(), async_op=True)
            return
        reduce_scatter = newest("reduce_scatter_single", "reduce_scatter_tensor")
        bucket.arriving = torch.empty_like(self.part(bucket.flat))
        bucket.work = reduce_scatter(bucket.arriving, bucket.flat, group=self.group, async_op=True)

    def _wait(self, bucket: Bucket) -> None:
        if bucket.work is None or bucket.flat is None:
            return
        bucket.work.wait()
        if bucket.arriving is None:
            for parameter in bucket.places:
                parameter.grad = as_gradient(parameter, bucket.view(bucket.flat, parameter))
                setattr(parameter.grad, SUMMED, True)
        else:
            bucket.reduced = bucket.arriving if bucket.reduced is None else bucket.reduced.add_(bucket.arriving)
        bucket.work = bucket.flat = bucket.arriving = None

    def _wait_for_all_but_one(self) -> None:
        for bucket in [bucket for bucket in self.buckets if bucket.work is not None][:-1]:
            self._wait(bucket)

    def _reset(self) -> None:
        self._launched, self._under_way = 0, False
        for bucket in self.buckets:
            bucket.waiting = set(bucket.places)


def as_gradient(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """A local gradient, as the gradient of a parameter that may be split over another mesh."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
