"""Checkpoints of a run: saved in the background, loaded into whatever layout, never half there.

`save` copies what this rank is to write into memory of the host, and a thread writes it with PyTorch's DCP, over a
group of its own, so that training goes on meanwhile. What the files hold are whole tensors in boxes (`state.py`), not a
layout: any layout reads the boxes it needs. A run's own checkpoints are trusted (DCP's metadata is a pickle).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from echelon.parallel.optimizer import Optimizer
from echelon.train import checkpoint_folder as folders
from echelon.train.boxes import Box
from echelon.train.checkpoint_folder import CheckpointError, complete
from echelon.train.planner import ReadBoxes, WriteBoxes
from echelon.train.state import Held, State, gather_no_more

__all__ = ["CheckpointError", "Checkpoints", "complete"]
SAVE_TIMEOUT = timedelta(hours=2)  # how long the quickest rank may wait for the slowest disk

T = TypeVar("T")


class Checkpoints:
    """One a rank, made by all ranks after model and optimizer.

    `about` is what must be the same in whoever loads: JSON that identifies the model and its precision.
    """

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: Optimizer, *, keep: int, about: dict[str, Any]
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint is kept")
        self._folder, self._keep = folder.absolute(), keep
        self._about: dict[str, Any] = json.loads(json.dumps(about))
        self._model, self._optimizer = model, optimizer
        self._state = State(model, optimizer)
        self._group = dist.new_group(timeout=SAVE_TIMEOUT, group_desc="checkpoint")
        self._host: dict[tuple[str, Box], Tensor] = {}  # what is being written, kept from save to save
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._on_first(partial(folders.clean, self._folder))

    def save(self, step: int, state: dict[str, Any]) -> float:
        """Begin to save; `state` is JSON. Returns the seconds for which training stood still: until the save before
        was complete, and all was copied.
        """
        start = time.perf_counter()
        self.wait()
        staged = self._stage(self._state.to_save())
        scale = _scale(self._optimizer.state_dict())
        kind = type(self._optimizer.inner).__name__
        description = folders.describe(step=step, about=self._about, optimizer={"kind": kind, **scale}, state=state)
        self._thread = threading.Thread(
            target=self._write, args=(step, staged, description), name="checkpoint", daemon=True
        )
        self._thread.start()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until the save that is under way is complete; a save that failed is an error here, on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(failure)

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """Read the newest checkpoint, or that of a step, into model and optimizer, whatever layout wrote it; returns
        the `state` that was saved with it, and its `step`. None if there is none. Nothing is touched before the
        checkpoint has been looked over.
        """
        self.wait()
        found = self._on_first(partial(self._find, step, self._shapes()))
        if found is None:
            return None
        path, description, metadata = found
        gather_no_more(self._model)
        wanted, given = self._state.to_load(metadata)
        try:
            dcp.load(
                {},
                storage_reader=dcp.FileSystemReader(path),
                planner=ReadBoxes(wanted),
                process_group=self._group,
            )
        except dcp.CheckpointException as error:
            advice = folders.advice(self._folder, path)
            raise CheckpointError(f"{path} cannot be read: {_reasons(error)}. {advice}") from error
        self._optimizer.load_state_dict(given | _scale(description["optimizer"]))
        state: dict[str, Any] = description["state"]
        return {"step": description["step"], **state}

    def close(self) -> None:
        """Wait for the save that is under way, and give back what this holds."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self._group)
            self._host = {}

    def _stage(self, tensors: dict[str, Held]) -> dict[str, Held]:
        """Copy to the host what this rank writes."""
        staged, host = {}, {}
        on_gpu = False
        for name, tensor in tensors.items():
            chunks = []
            for box, memory in tensor.chunks if tensor.writes else []:
                copy = self._host.get((name, box))
                if copy is None:
                    copy = torch.empty(box.sizes, dtype=tensor.dtype, pin_memory=memory.is_cuda)
                copy.copy_(memory, non_blocking=True)
                host[name, box] = copy
                chunks.append((box, copy))
                on_gpu |= memory.is_cuda
            staged[name] = Held(tensor.shape, tensor.dtype, chunks)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self._host = host
        return staged

    def _write(self, step: int, staged: dict[str, Held], description: str) -> None:
        """In the thread: every rank its files, then the first rank the rest; all learn how it went."""
        saving = folders.path_of(self._folder, step).with_suffix(".saving")
        failed: BaseException | None = None
        try:
            try:
                writer = dcp.FileSystemWriter(saving, per_thread_copy_ahead=0)
                dcp.save({}, storage_writer=writer, planner=WriteBoxes(staged), process_group=self._group)
            except dcp.CheckpointException as error:  # the same on all ranks
                failed = error
            self._on_first(partial(self._finish, step, saving, description, failed))
        except BaseException as error:  # told by the next `wait`, in the thread that trains
            self._failure = str(error) if isinstance(error, CheckpointError) else _reason(error)

    def _finish(self, step: int, saving: Path, description: str, failed: BaseException | None) -> None:
        """On the first rank, when all have written or some have failed."""
        try:
            if failed is not None:
                raise failed
            folders.commit(saving, description)
        except BaseException as error:
            free = shutil.disk_usage(self._folder).free if self._folder.is_dir() else 0
            shutil.rmtree(saving, ignore_errors=True)
            last = f"The last good one is of step {good[-1]}" if (good := complete(self._folder)) else "None is there"
            raise CheckpointError(
                f"step {step} could not be saved in {self._folder}, where {free} bytes are free: "
                f"{_reasons(error)}. {last}"
            ) from error
        folders.prune(self._folder, self._keep, step)

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of all tensors of the model, wherever they are."""
        mine = {name: (tensor.shape, tensor.dtype) for name, tensor in self._state.of_model().items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        return {name: shape for told in everyone for name, shape in told.items()}

    def _find(
        self, step: int | None, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> tuple[Path, dict[str, Any], Any] | None:
        """On the first rank: a checkpoint that is whole, and of this model."""
        found = folders.read(self._folder, step)
        if found is not None:
            path, description, metadata = found
            theirs = {**description["about"], "optimizer": description["optimizer"]["kind"]}
            problem = difference(theirs, {**self._about, "optimizer": type(self._optimizer.inner).__name__})
            if problem:
                raise folders.of_another_run(path, problem)
            folders.check_tensors(path, metadata, shapes)
        return found

    def _on_first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank; all have its result, or its error."""
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                answer = [(function(), None)]
            except Exception as error:  # or the others would wait for ever
                answer = [(None, str(error) if isinstance(error, CheckpointError) else _reason(error))]
        dist.broadcast_object_list(answer, src=0, group=self._group)
        result, problem = answer[0]
        if problem is not None:
            raise CheckpointError(problem)
        found: T = result
        return found


def difference(theirs: Any, mine: Any, name: str = "") -> str | None:
    """The first thing in which two descriptions, as JSON has them, differ, in words."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in [*theirs, *(key for key in mine if key not in theirs)]:
            found = difference(theirs.get(key), mine.get(key), f"{name}.{key}".lstrip("."))
            if found:
                return found
        return None
    return None if theirs == mine else f"its {name} is {_word(theirs)}, here it is {_word(mine)}"


def _word(value: Any) -> str:
    return "not set" if value is None else str(value)


def _scale(saved: dict[str, Any]) -> dict[str, Any]:
    """Of what an optimizer saves, its scaling of the loss."""
    return {name: saved[name] for name in ("loss_scale", "good_steps")}


def _reasons(error: BaseException) -> str:
    """What went wrong, without the tracebacks of all ranks."""
    if isinstance(error, dcp.CheckpointException):
        return "; ".join(f"rank {rank}: {_reason(each)}" for rank, (each, _) in error.failures.items())
    return _reason(error)


def _reason(error: BaseException) -> str:
    if "inline_container" in str(error):  # where PyTorch forgets what the system said
        return f"a write failed inside PyTorch, as on a full disk ({os.strerror(errno.ENOSPC)}): {error}"
    return f"{type(error).__name__}: {error}"
