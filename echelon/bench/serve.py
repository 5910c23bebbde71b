"""`echelon bench serve`: send requests when their time has come, note when the answers arrive, tell the figures.

`drive` knows nothing of what answers it (`serve_target.py`): a server or an engine. Clock and waiting are the event
loop's where it is tested, so that arrivals are exactly known there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from echelon.bench.serve_client import Client, Failed
from echelon.bench.serve_load import IDS, Request, arrivals, custom_requests, random_requests
from echelon.bench.serve_options import ServeOptions
from echelon.bench.serve_result import Outcome, Result
from echelon.bench.serve_target import Chunk, Clock, InProcess, Server, Target
from echelon.models.tokenizer import Tokenizer, open_tokenizer

_ERRORS_TOLD = 3
Told = Callable[[Outcome], object]


async def drive(
    target: Target,
    requests: Sequence[Request],
    times: Sequence[float],
    most: int | None,
    clock: Clock,
    told: Told = lambda _outcome: None,
) -> tuple[list[Outcome], float]:
    """Send each request at its time, at most so many at once, and wait for all; also returns how long it took."""
    start = clock()
    gate = asyncio.Semaphore(most or len(requests))

    async def one(request: Request) -> Outcome:
        came = clock()
        async with gate:
            outcome = await ask(target, request, clock)
        outcome.queued, outcome.start = outcome.start - came, outcome.start - start
        told(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, at in zip(requests, times, strict=True):
            if (wait := start + at - clock()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks], clock() - start


async def ask(target: Target, request: Request, clock: Clock) -> Outcome:
    """One request, to its end. That it failed is an outcome too, whatever the reason."""
    outcome = Outcome(clock(), prompt_tokens=request.prompt_tokens)
    last, counted = outcome.start, 0
    texts: list[str] = []
    try:
        async with aclosing(target.send(request)) as answer:
            async for what in answer:
                if isinstance(what, Chunk):
                    if texts:
                        outcome.gaps.append(what.seconds - last)
                    else:
                        outcome.ttft = what.seconds - outcome.start
                    last = what.seconds
                    texts.append(what.text)
                else:
                    outcome.prompt_tokens, counted = what.prompt_tokens, what.output_tokens
        if not texts:
            raise Failed("the answer ended without a token")
    except Failed as error:
        outcome.error = str(error)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.text, outcome.latency = "".join(texts), last - outcome.start
    outcome.output_tokens = counted or len(texts)
    return outcome


def main(options: ServeOptions) -> int:
    """Measure, print and write; returns the exit code."""
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else None
    *requests, first = make_requests(options, tokenizer)
    result = asyncio.run(_measured(options, requests, first))
    for path in options.files(result.about):
        result.write(path, options.save_detailed)
    for line in result.lines(options.percentile_metrics, options.request_rate, options.max_concurrency):
        print(line)
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for error in list(dict.fromkeys(result.errors))[:_ERRORS_TOLD]:
        console.print(f"echelon: a request failed: {error}", style="red")
    return 0 if result.good else 1


def make_requests(options: ServeOptions, tokenizer: Tokenizer | None) -> list[Request]:
    """Those that are measured, and one more, with which the server is tried: its prompt is none of theirs, so that a
    cache of prefixes does not know any.
    """
    count = options.num_prompts + 1
    if options.dataset_name == "custom":
        return custom_requests(count, Path(options.dataset_path), options.custom_output_len, tokenizer)
    ids = range(tokenizer.vocabulary) if tokenizer is not None else IDS
    chat = options.backend == "openai-chat"
    return random_requests(count, options.random, options.seed, ids, tokenizer, text=chat)


async def _measured(options: ServeOptions, requests: list[Request], first: Request) -> Result:
    clock = time.perf_counter
    target = await _open(options, clock)
    try:
        tried = await ask(target, first, clock)
        if tried.error:
            raise Failed(f"a first request was not answered: {tried.error}")
        await drive(target, [first] * options.num_warmups, [0.0] * options.num_warmups, options.max_concurrency, clock)
        times = arrivals(len(requests), options.request_rate, options.burstiness, options.seed)
        with _progress(options) as progress:
            bar = progress.add_task("requests", total=len(requests))
            outcomes, seconds = await drive(
                target, requests, times, options.max_concurrency, clock, lambda _: progress.advance(bar)
            )
    finally:
        await target.close()
    return Result(outcomes, seconds, options.percentiles, options.goodput, options.about(target.model))


async def _open(options: ServeOptions, clock: Clock) -> Target:
    if options.in_process or options.weights:
        return _in_process(options, clock)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    client = Client(options.url, headers)
    model = await Server.find_model(client, options.model)
    return Server(client, options.backend, options.endpoint, model, options.sampling, clock)


def _in_process(options: ServeOptions, clock: Clock) -> Target:
    """What imports torch is imported here: who asks a server does not wait for it."""
    from echelon.serve.options import Options
    from echelon.serve.ranks import open_engine

    engine = open_engine(
        Options(
            source=options.in_process,
            random=options.weights,
            precision=options.precision,
            device=options.device,
            most_waiting=max(options.num_prompts, Options.most_waiting),
        )
    )
    assert engine is not None  # there are no other ranks
    return InProcess(engine, options.sampling, clock, chat=options.backend == "openai-chat")


def _progress(options: ServeOptions) -> Progress:
    """A bar, where a person sees it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=options.quiet or not console.is_terminal, transient=True)
