"""The commands `echelon serve` and `echelon generate`: start ranks where several are wanted, or are one themselves.

What imports torch is imported when a command runs, since every other command imports this module too.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from echelon.launch.find import NoMPI, find
from echelon.launch.identity import identity
from echelon.launch.report import ranks_text
from echelon.launch.say import fail, say
from echelon.launch.start import Job, run

if TYPE_CHECKING:
    from echelon.serve.options import Options

KEY_VARIABLE = "ECHELON_API_KEY"
REFUSED = 2
STOP, REFUSALS = "stop", "refused-"  # files by which the command tells its ranks to end, and they tell it why they do
_GENERATE_STOP_SECONDS = 5.0  # after Ctrl-C, for the piece that is being computed, or what is being loaded
_WHAT, _HOW, _LIMITS, _SERVER, _ANSWER = "What is served", "How", "The engine's limits", "The server", "The answer"

Source = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face folder, a run's folder, or a file of these options (TOML).", show_default=False
    ),
]
Random = Annotated[
    str, typer.Option(metavar="NAME", help="A preset without weights: llama-tiny, gpt2, …", rich_help_panel=_WHAT)
]
Ranks = Annotated[
    Optional[int], typer.Option("-n", "--ranks", min=1, help="How many ranks to start.", rich_help_panel=_HOW)
]
Tp = Annotated[
    Optional[int], typer.Option(min=1, help="Ranks that share the model (default: all).", rich_help_panel=_HOW)
]
Precision = Annotated[
    str, typer.Option(help="auto (as stored; for int8 and fp8 bf16), fp32, bf16 or fp16.", rich_help_panel=_HOW)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.", rich_help_panel=_HOW)]
Quantize = Annotated[str, typer.Option(help="none, int8 (weights), int8-dynamic or fp8.", rich_help_panel=_HOW)]
Threads = Annotated[int, typer.Option(help="Of each rank; 0: as many as are good.", rich_help_panel=_HOW)]
Reproducible = Annotated[
    bool,
    typer.Option("--reproducible", help="The same bits, whatever else is served; slower.", rich_help_panel=_HOW),
]
Context = Annotated[
    int, typer.Option(help="Most tokens of prompt and answer; 0: the model's.", rich_help_panel=_LIMITS)
]
Record = Annotated[
    Optional[Path],
    typer.Option(
        help="A new folder for a record of the ranks' communication, for `echelon trace`.", rich_help_panel=_HOW
    ),
]
Fused = Annotated[
    bool, typer.Option("--fused/--no-fused", help="The engine's own kernels, on a GPU.", rich_help_panel=_HOW)
]
Graphs = Annotated[
    bool, typer.Option("--graphs/--no-graphs", help="CUDA graphs of steps that are not large.", rich_help_panel=_HOW)
]
Ahead = Annotated[
    bool,
    typer.Option(
        "--ahead/--no-ahead", help="Launch a step before the last one's tokens are known.", rich_help_panel=_HOW
    ),
]
CacheGib = Annotated[
    float,
    typer.Option(help="For keys and values; 0: a share of what is free, on a GPU all of it.", rich_help_panel=_LIMITS),
]
TokenBudget = Annotated[
    int, typer.Option(help="Most tokens of a step; 0: 512, on a GPU 8192.", rich_help_panel=_LIMITS)
]
MostRunning = Annotated[
    int, typer.Option(help="Most requests in a step; 0: 64, on a GPU 256.", rich_help_panel=_LIMITS)
]


def serve(
    command: typer.Context,
    source: Source = "",
    random: Random = "",
    ranks: Ranks = None,
    tp: Tp = None,
    precision: Precision = "auto",
    device: Device = "auto",
    quantize: Quantize = "none",
    threads: Threads = 0,
    reproducible: Reproducible = False,
    fused: Fused = True,
    graphs: Graphs = True,
    ahead: Ahead = True,
    record: Record = None,
    context: Context = 0,
    cache_gib: CacheGib = 0.0,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.", rich_help_panel=_LIMITS)] = 16,
    token_budget: TokenBudget = 0,
    most_running: MostRunning = 0,
    most_waiting: Annotated[int, typer.Option(help="More are refused (429).", rich_help_panel=_LIMITS)] = 1024,
    slo: Annotated[
        str,
        typer.Option(help="Promises, as ttft=5s,tbt=25ms: who would wait longer is refused.", rich_help_panel=_LIMITS),
    ] = "",
    host: Annotated[str, typer.Option(help="0.0.0.0 for everyone.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.", rich_help_panel=_SERVER)] = 8000,
    api_key: Annotated[
        str,
        typer.Option(envvar=KEY_VARIABLE, help="What clients must know.", show_default=False, rich_help_panel=_SERVER),
    ] = "",
    max_body_mib: Annotated[float, typer.Option(help="Of a request.", rich_help_panel=_SERVER)] = 8.0,
    drain_seconds: Annotated[
        float, typer.Option(help="For live requests, when the server is told to end.", rich_help_panel=_SERVER)
    ] = 30.0,
) -> None:
    """Serve a model to any OpenAI client, with a page to try it at its address."""
    options, size = _options(command, ranks)
    if api_key:
        os.environ[KEY_VARIABLE] = api_key  # and not in the command line of ranks, which anyone can see
    _go("serve", options, size, record)


def generate(
    command: typer.Context,
    source: Annotated[
        str,
        typer.Argument(help="A Hugging Face folder, a run's folder, or with --random a prompt.", show_default=False),
    ],
    prompt: Annotated[str, typer.Argument(help="What to go on with; - reads it.", show_default=False)] = "",
    random: Random = "",
    ranks: Ranks = None,
    tp: Tp = None,
    precision: Precision = "auto",
    device: Device = "auto",
    quantize: Quantize = "none",
    threads: Threads = 0,
    reproducible: Reproducible = False,
    fused: Fused = True,
    graphs: Graphs = True,
    ahead: Ahead = True,
    record: Record = None,
    context: Context = 0,
    cache_gib: CacheGib = 0.0,
    chat: Annotated[
        bool, typer.Option("--chat", help="By the model's chat template.", rich_help_panel=_ANSWER)
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=_ANSWER)] = 128,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token.", rich_help_panel=_ANSWER)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Only the so-many likeliest; 0: all.", rich_help_panel=_ANSWER)] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest with this share.", rich_help_panel=_ANSWER)] = 1.0,
    min_p: Annotated[float, typer.Option(help="Of the likeliest's probability.", rich_help_panel=_ANSWER)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(rich_help_panel=_ANSWER)] = 1.0,
    seed: Annotated[Optional[int], typer.Option(show_default=False, rich_help_panel=_ANSWER)] = None,
    stop: Annotated[
        Optional[list[str]], typer.Option(help="A text at which to end; repeatable.", rich_help_panel=_ANSWER)
    ] = None,
) -> None:
    """Let a model go on with a prompt, and print it as it comes."""
    if random:
        if prompt:
            fail(f"with --random {random} only a prompt is named, and not a folder as well", REFUSED)
        command.params["source"], prompt = "", source
    options, size = _options(command, ranks)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    how = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    _go("generate", options, size, record, {"prompt": prompt, "chat": chat, "params": how})


def _options(command: typer.Context, ranks: int | None) -> tuple[Options, int]:
    """What is asked for, and of how many ranks; flags come before what a file says."""
    from echelon.serve.options import OptionError, Options, read

    given = dict(command.params)
    fields = {field.name for field in dataclasses.fields(Options)}
    sources = {name: command.get_parameter_source(name) for name in given}
    by_flag = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    try:
        file = Path(given["source"]) if given["source"].endswith(".toml") else None
        if file is not None and not file.exists():
            raise OptionError(f"{file} is not there")
        told = read(file) if file is not None and file.is_file() else {}
        if told:
            given["source"] = told.get("source", "")
        chosen = {name: value for name, value in given.items() if name in fields}
        chosen |= {name: value for name, value in told.items() if name not in by_flag or name == "source"}
        me = identity()
        running = me.size if me.launcher != "none" else None
        if running is not None and ranks not in (None, running):
            raise OptionError(f"this is already one of {running} ranks: leave -n out here")
        size = running or ranks or chosen["tp"] or 1
        chosen["tp"] = chosen["tp"] or size
        options = Options(**chosen)
        if options.tp != size:
            raise OptionError(f"-n {size} with tp={options.tp}: all ranks share one model, so both are the same")
        return options, size
    except OptionError as error:
        if identity().rank:  # the first rank says it for all
            raise typer.Exit(REFUSED) from None
        fail(str(error), REFUSED)


def _go(what: str, options: Options, size: int, record: Path | None, more: dict[str, Any] | None = None) -> None:
    """Here, if this is one process or already a rank; else on ranks that are started now."""
    if record is not None:
        if size == 1 or identity().launcher != "none":
            fail("--record is for ranks that this command starts: use -n 2 or more", REFUSED)
        if record.exists() and (not record.is_dir() or any(record.iterdir())):
            fail(f"{record} exists and is not an empty folder: a record needs one of its own", REFUSED)
    if size == 1 or identity().launcher != "none":
        from echelon.serve.rank import main

        raise typer.Exit(main(what, options, more or {}))
    import json

    try:
        mpi = find(passed_over=lambda other: say(f"passing over {other.mpiexec}: {other.reason}"))
    except NoMPI as error:
        fail(str(error), REFUSED)
    with tempfile.TemporaryDirectory(prefix="echelon-serve-") as folder:
        told = Path(folder) / "told.json"  # and not in a command line, which anyone can see
        told.write_text(json.dumps({"what": what, "options": options.to_text(), "more": more or {}}))
        command = [sys.executable, "-m", "echelon.serve.rank", str(told)]
        limit = options.drain_seconds + 30 if what == "serve" else _GENERATE_STOP_SECONDS
        job = Job(size, command, record=record, stop=Path(folder) / STOP, stop_seconds=limit, refusal=REFUSED)
        code = run(job, mpi)
        _say_refusals(Path(folder), size)
    raise typer.Exit(code)


def _say_refusals(folder: Path, size: int) -> None:
    """What ranks have said, once; and who has, if it was not all of them."""
    said: dict[str, list[int]] = {}
    for path in sorted(folder.glob(f"{REFUSALS}*")):
        said.setdefault(path.read_text(), []).append(int(path.name.removeprefix(REFUSALS)))
    for why, ranks in said.items():
        say(why if 0 in ranks or len(ranks) == size else f"{ranks_text(ranks)}: {why}")
