"""One rank of `echelon serve` or `echelon generate`: says what goes wrong, and ends with an exit code.

`python -m echelon.serve.rank TOLD` runs on every rank that the command starts; a process alone is one, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from echelon.comm.world import end_well
from echelon.launch.identity import identity
from echelon.launch.say import say
from echelon.models.tokenizer import TokenizerError
from echelon.serve.command import KEY_VARIABLE, REFUSED
from echelon.serve.load import LoadError
from echelon.serve.options import Options
from echelon.serve.ranks import engine_of
from echelon.serve.request import BadRequest, SamplingParams

if TYPE_CHECKING:
    from echelon.serve.engine import Engine


def main(what: str, options: Options, more: dict[str, Any], stop: Path | None = None) -> int:
    """The exit code."""
    try:
        listener = None
        if what == "serve" and identity().rank == 0:
            from echelon.serve.server import listen

            listener = listen(options.host, options.port)  # before the model is loaded: that takes a while
        with engine_of(options) as engine:
            if engine is None:
                code = 0
            elif what == "serve":
                code = _serve(engine, options, listener, stop)
            else:
                code = _generate(engine, **more)
    except (BadRequest, LoadError, TokenizerError, ValueError) as error:
        if identity().rank == 0:
            say(str(error))
        code = REFUSED
    except ModuleNotFoundError as error:
        if identity().rank == 0:
            say(f"{error.name} is missing: pip install 'echelon[serve]'")
        code = REFUSED
    if dist.is_initialized() and code == 0:
        dist.destroy_process_group()
        end_well()
    return code


def _serve(engine: Engine, options: Options, listener: Any, stop: Path | None) -> int:
    from echelon.serve.server import serve

    return serve(
        engine,
        listener,
        api_key=os.environ.get(KEY_VARIABLE) or None,
        max_body=int(options.max_body_mib * 2**20),
        drain_seconds=options.drain_seconds,
        stop=stop,
    )


def _generate(engine: Engine, prompt: str, chat: bool, params: dict[str, Any]) -> int:
    tokens = engine.text.chat([{"role": "user", "content": prompt}]) if chat else engine.text.encode(prompt)
    room = max(engine.context - len(tokens), 1)
    how = SamplingParams(**params | {"max_tokens": min(params["max_tokens"], room), "stop": tuple(params["stop"])})
    if not chat:
        print(prompt, end="", flush=True)
    for piece in engine.open(tokens, how):
        print(piece.text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    sys.exit(main(told["what"], Options.from_text(told["options"]), told["more"], Path(told["stop"])))
