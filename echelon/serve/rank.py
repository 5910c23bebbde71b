"""One rank of `echelon serve` or `echelon generate`: says what goes wrong, and ends with an exit code.

`python -m echelon.serve.rank TOLD` runs on every rank that the command starts; a process alone is one, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from echelon.comm.world import end_well
from echelon.launch.identity import identity
from echelon.launch.say import busy, say
from echelon.serve.command import KEY_VARIABLE, REFUSALS, REFUSED, STOP
from echelon.serve.options import Options
from echelon.serve.ranks import join, open_engine
from echelon.serve.request import BadRequest, SamplingParams

if TYPE_CHECKING:
    from echelon.serve.engine import Engine


_FAILED, _INTERRUPTED = 1, 130  # the engine; by the user, as shells say it


def main(what: str, options: Options, more: dict[str, Any], folder: Path | None = None) -> int:
    """The exit code. `folder` is that of the command that has started this rank, if one has."""
    stop = None if folder is None else folder / STOP
    try:
        listener = _listen(options) if what == "serve" else None  # before the model is loaded: that takes a while
        is_first = identity().rank == 0  # the others load, and follow until the end
        loading = f"loading {options.random or options.source}"
        line = f"{loading}; requests wait until it is ready" if what == "serve" else ""
        with busy(loading, line) if is_first else contextlib.nullcontext():
            engine = open_engine(options)
    except ModuleNotFoundError as error:
        return _refused(f"{error.name} is missing: pip install 'echelon[serve]'", folder)
    except ValueError as error:
        return _refused(str(error), folder)
    code = 0
    if engine is not None:
        with engine:
            try:
                code = _serve(engine, options, listener, stop) if what == "serve" else _generate(engine, stop, **more)
            except BadRequest as error:
                code = _refused(str(error), folder)
    if dist.is_initialized() and code != _FAILED:  # all have ended together
        dist.destroy_process_group()
        end_well()
    return code


def _refused(why: str, folder: Path | None) -> int:
    """What is wrong for all is said once: by the command, if it can be told."""
    rank = identity().rank
    if folder is None:
        say(why if rank == 0 else f"rank {rank}: {why}")
    else:
        (folder / f"{REFUSALS}{rank:06}").write_text(why)
    return REFUSED


def _listen(options: Options) -> Any:
    """The first rank takes the address; if it cannot, all end."""
    from echelon.serve.server import CannotListen, listen

    group, listener, told = join(options), None, [""]
    if identity().rank == 0:
        try:
            listener = listen(options.host, options.port)
        except CannotListen as error:
            told = [str(error)]
    if group is not None:
        dist.broadcast_object_list(told, group=group, group_src=0)
    if told[0] and identity().rank == 0:
        raise CannotListen(told[0])
    if told[0]:
        sys.exit(REFUSED)
    return listener


def _serve(engine: Engine, options: Options, listener: Any, stop: Path | None) -> int:
    from echelon.serve.server import serve

    return serve(
        engine,
        listener,
        api_key=os.environ.get(KEY_VARIABLE) or None,
        max_body=int(options.max_body_mib * 2**20),
        drain_seconds=options.drain_seconds,
        stop=stop,
        name=options.host,
    )


def _generate(engine: Engine, stop: Path | None, prompt: str, chat: bool, params: dict[str, Any]) -> int:
    tokens = engine.text.chat([{"role": "user", "content": prompt}]) if chat else engine.text.encode(prompt)
    room = max(engine.context - len(tokens), 1)
    how = SamplingParams(**params | {"max_tokens": min(params["max_tokens"], room), "stop": tuple(params["stop"])})
    if how.max_tokens != params["max_tokens"]:
        say(f"{how.max_tokens} tokens at most: prompt and answer may have {engine.context}")
    stream = engine.open(tokens, how)
    if not chat:
        print(prompt, end="", flush=True)
    for piece in stream:
        print(piece.text, end="", flush=True)
        if stop is not None and stop.exists():
            break
    print()
    return _INTERRUPTED if stop is not None and stop.exists() else 0


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text())
    sys.exit(main(told["what"], Options.from_text(told["options"]), told["more"], Path(sys.argv[1]).parent))
