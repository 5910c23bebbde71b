"""The ranks of a service: the first has the engine, and the others compute what it tells them.

A run's folder is served as the model of its newest checkpoint, which is written as a Hugging Face folder first: each
rank then reads its own slices of it.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.launch.say import say
from echelon.parallel.layout import Layout
from echelon.serve import memory
from echelon.serve.engine import Engine
from echelon.serve.load import Loaded, LoadError, load, resolve_device
from echelon.serve.options import Options
from echelon.serve.quantize import quantize
from echelon.serve.runner import Runner
from echelon.serve.settings import Settings
from echelon.serve.text import Text

_EXPORTS = "serving"  # a folder of a run


def open_engine(options: Options) -> Engine | None:
    """The engine, on the first rank; on the others None, when it was closed. All ranks of the world call this."""
    if options.threads:
        torch.set_num_threads(options.threads)
    group = join(options)
    settings = options.settings()
    loaded = _load(options, group)
    if group is not None and group.rank() > 0:
        _follow(loaded.model, settings, group)
        return None
    return Engine(loaded.model, loaded.text, settings, name=loaded.name, group=group)


@cache
def join(options: Options) -> dist.ProcessGroup | None:
    """The group of the ranks that share the model; each with a GPU of its own, where they are on GPUs."""
    if options.tp == 1:
        return None
    if not dist.is_initialized():
        dist.init_process_group("echelon")
    kind = resolve_device(options.device).type
    return Layout(tp=options.tp).build(kind).mesh("tp").get_group()  # by that name it is recorded


def _load(options: Options, group: dist.ProcessGroup | None) -> Loaded:
    precision = options.precision
    if precision == "auto" and options.quantize in ("int8", "fp8"):
        precision = "bf16"  # in fp32 they would save memory alone (quantize.py)
    how: dict[str, Any] = {"precision": precision, "device": options.device, "group": group}
    if options.random:
        loaded = load(options.random, random=True, **how)
    elif (Path(options.source) / "config.toml").is_file():
        folder, tokenizer, name = _exported(Path(options.source), group)
        found = load(folder, text=Text.of_name(tokenizer), **how)
        loaded = replace(found, name=name)
    else:
        loaded = load(options.source, **how)
    if options.quantize != "none":
        quantize(loaded.model, options.quantize)
    return loaded


def _exported(run: Path, group: dist.ProcessGroup | None) -> tuple[str, str, str]:
    """A run's newest checkpoint as a Hugging Face folder, made by the first rank if it is not there yet; the run's
    tokenizer; and a name.
    """
    from echelon.train.checkpoint_folder import CheckpointError, complete
    from echelon.train.config import ConfigError
    from echelon.train.config import load as load_config
    from echelon.train.export import export

    told: list[Any] = [None]
    if group is None or group.rank() == 0:
        try:
            step = max(complete(run / "checkpoints"), default=None)
            if step is None:
                raise CheckpointError(f"{run} is a run that has no checkpoint yet")
            folder = run / _EXPORTS / f"step-{step}"
            if not (folder / "config.json").is_file():
                say(f"writing the model of {run}, step {step}, to {folder}")
                folder.parent.mkdir(exist_ok=True)
                export(run, folder, step)
            told = [(str(folder), load_config(run / "config.toml").data.tokenizer, f"{run.resolve().name}-step-{step}")]
        except (CheckpointError, ConfigError) as error:
            told = [LoadError(str(error))]
        except OSError as error:
            told = [LoadError(f"{run} cannot be read, or {_EXPORTS} in it not written: {error.strerror}")]
    if group is not None:
        dist.broadcast_object_list(told, group=group, group_src=0)
    if isinstance(told[0], LoadError):
        raise told[0]
    found: tuple[str, str, str] = told[0]
    return found


def _follow(model: Any, settings: Settings, group: dist.ProcessGroup) -> None:
    """The first rank hears signals, and tells this one when the end has come."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = settings.on(next(model.parameters()).device)
    Runner(model, memory.shape(model, settings, group), settings, group=group).follow()
