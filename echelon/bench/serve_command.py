"""The command `echelon bench serve`: its options are those of `vllm bench serve`.

What imports torch or numpy is imported when the command runs, since every other command imports this module too.
"""

from __future__ import annotations

import math
from typing import Annotated, Optional

import typer

from echelon.bench.command import refuse, several
from echelon.launch.say import fail

_WHO, _WHAT, _WHEN, _HOW, _WHERE = "Who is asked", "What is asked", "When", "Sampling", "What is told and written"


def serve(
    context: typer.Context,
    base_url: Annotated[str, typer.Option(help="Of the server, in place of host and port.", rich_help_panel=_WHO)] = "",
    host: Annotated[str, typer.Option(rich_help_panel=_WHO)] = "127.0.0.1",
    port: Annotated[int, typer.Option(rich_help_panel=_WHO)] = 8000,
    endpoint: Annotated[
        str, typer.Option(help="A path of its own (default: the backend's).", rich_help_panel=_WHO)
    ] = "",
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.", rich_help_panel=_WHO)] = "openai",
    model: Annotated[str, typer.Option(help="Its name (default: the server's first).", rich_help_panel=_WHO)] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", show_default=False, rich_help_panel=_WHO)] = "",
    in_process: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="No server, but a model in an engine of this process.", rich_help_panel=_WHO
        ),
    ] = "",
    weights: Annotated[
        str,
        typer.Option(
            "--random", metavar="NAME", help="The same, a preset with random weights: llama-tiny.", rich_help_panel=_WHO
        ),
    ] = "",
    precision: Annotated[
        str, typer.Option(help="Of that model: auto, fp32, bf16 or fp16.", rich_help_panel=_WHO)
    ] = "auto",
    device: Annotated[str, typer.Option(help="Its place: auto, cpu or cuda.", rich_help_panel=_WHO)] = "auto",
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="A tokenizer.json or its folder: all its tokens are used.", rich_help_panel=_WHAT
        ),
    ] = "",
    dataset_name: Annotated[str, typer.Option(help="random or custom.", rich_help_panel=_WHAT)] = "random",
    dataset_path: Annotated[
        str,
        typer.Option(
            metavar="FILE", help='For custom: a line is {"prompt": "…", "output_tokens": 64}.', rich_help_panel=_WHAT
        ),
    ] = "",
    num_prompts: Annotated[int, typer.Option(help="How many requests.", rich_help_panel=_WHAT)] = 1000,
    random_input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", help="Tokens of a prompt.", rich_help_panel=_WHAT)
    ] = 1024,
    random_output_len: Annotated[
        int, typer.Option("--output-len", "--random-output-len", help="Tokens of an answer.", rich_help_panel=_WHAT)
    ] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths spread by this part of them, both ways.", rich_help_panel=_WHAT)
    ] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(help="Tokens before each prompt, the same in all.", rich_help_panel=_WHAT)
    ] = 0,
    custom_output_len: Annotated[
        int, typer.Option(help="Tokens of an answer where a line tells none.", rich_help_panel=_WHAT)
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and times.", rich_help_panel=_WHAT)] = 0,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second; inf: all at once.", rich_help_panel=_WHEN)
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma-distributed gaps; 1 is Poisson, less is burstier.", rich_help_panel=_WHEN
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        Optional[int], typer.Option(help="Most that run at once; others wait here.", rich_help_panel=_WHEN)
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before, not counted.", rich_help_panel=_WHEN)] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers have all the tokens asked for.", rich_help_panel=_HOW)
    ] = False,
    temperature: Annotated[Optional[float], typer.Option(rich_help_panel=_HOW)] = None,
    top_p: Annotated[Optional[float], typer.Option(rich_help_panel=_HOW)] = None,
    top_k: Annotated[Optional[int], typer.Option(rich_help_panel=_HOW)] = None,
    min_p: Annotated[Optional[float], typer.Option(rich_help_panel=_HOW)] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Of which times the table tells.", rich_help_panel=_WHERE)
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="As 50,90,99.", rich_help_panel=_WHERE)] = "99",
    goodput: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME:MS …",
            help="Count requests that keep to these: ttft:5000 tpot:25 e2el:60000.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    json: Annotated[str, typer.Option(metavar="FILE", help="The result as JSON.", rich_help_panel=_WHERE)] = "",
    save_result: Annotated[
        bool, typer.Option("--save-result", help="The same, under a name that tells of it.", rich_help_panel=_WHERE)
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With the times and texts of each.", rich_help_panel=_WHERE)
    ] = False,
    result_dir: Annotated[str, typer.Option(metavar="FOLDER", rich_help_panel=_WHERE)] = "",
    result_filename: Annotated[str, typer.Option(metavar="NAME", rich_help_panel=_WHERE)] = "",
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="No bar.", rich_help_panel=_WHERE)] = False,
) -> None:
    """Measure a server: times to tokens and throughput, with the flags and figures of `vllm bench serve`."""
    from echelon.bench.serve import main
    from echelon.bench.serve_client import Failed
    from echelon.bench.serve_load import RandomLoad
    from echelon.bench.serve_options import ServeOptions, parse_goodput, parse_percentiles

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    try:
        if context.args and not goodput:
            raise ValueError(f"{context.args[0]!r} belongs to no option: see --help")
        options = ServeOptions(
            base_url=base_url,
            host=host,
            port=port,
            endpoint=endpoint,
            backend=backend,
            model=model,
            in_process=in_process,
            weights=weights,
            precision=precision,
            device=device,
            tokenizer=tokenizer,
            api_key=api_key,
            dataset_name=dataset_name,
            dataset_path=dataset_path,
            custom_output_len=custom_output_len,
            random=RandomLoad(
                input_tokens=random_input_len,
                output_tokens=random_output_len,
                spread=random_range_ratio,
                prefix_tokens=random_prefix_len,
            ),
            num_prompts=num_prompts,
            request_rate=request_rate,
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            seed=seed,
            num_warmups=num_warmups,
            sampling={name: value for name, value in sampling.items() if value is not None}
            | ({"ignore_eos": True} if ignore_eos else {}),
            percentile_metrics=several(percentile_metrics),
            percentiles=parse_percentiles(metric_percentiles),
            goodput=parse_goodput([*(goodput or []), *context.args]),
            save_result=save_result,
            save_detailed=save_detailed,
            result_dir=result_dir,
            result_filename=result_filename,
            json=json,
            quiet=disable_tqdm,
        )
        options.check()
        code = main(options)
    except ValueError as error:
        refuse(error)
    except Failed as error:
        fail(str(error))
    raise typer.Exit(code)
