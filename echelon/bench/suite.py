"""`echelon bench all`: every benchmark that this number of ranks allows, into a folder with one report."""

from __future__ import annotations

from pathlib import Path

from echelon.bench import engine
from echelon.bench.catalogue import BENCHMARKS
from echelon.bench.operation import Benchmark
from echelon.bench.options import BadRequest, Options
from echelon.bench.result import Result, Row
from echelon.launch.say import bar_of_ranks


def run(options: Options, world: engine.World) -> bool:
    """Run all; True if one did not pass validation."""
    chosen, left_out = choose(options, world.ranks)
    steps = sum(len(list(options.sizes(benchmark, world.ranks))) for benchmark in chosen)
    results = []
    with bar_of_ranks(options.terminal, world.rank == 0, width=14) as progress:
        task = progress.add_task("", total=steps)
        for benchmark in chosen:
            result = engine.begin(benchmark, options, world)
            progress.update(task, description=benchmark.name, refresh=True)
            for row in engine.rows(benchmark, options, world):
                if isinstance(row, Row):
                    result.rows.append(row)
                    progress.update(task, advance=1, refresh=True)
                else:
                    result.failure = row
            results.append(result)
            if world.rank == 0:
                result.write(Path(options.output, f"{benchmark.name}.json"))
    if world.rank == 0:
        _report(results, left_out, options)
    return any(result.failure for result in results)


def choose(options: Options, ranks: int) -> tuple[list[Benchmark], dict[str, str]]:
    """What can be run as asked, and the rest with the reason."""
    chosen, left_out = [], {}
    for benchmark in BENCHMARKS.values():
        try:
            options.check_benchmark(benchmark, ranks)
        except BadRequest as error:
            left_out[benchmark.name] = str(error)
        else:
            chosen.append(benchmark)
    return chosen, left_out


def _report(results: list[Result], left_out: dict[str, str], options: Options) -> None:
    from echelon.bench.report import write

    path = write(results, left_out, Path(options.output))
    for result in results:
        if result.failure:
            print(f"# {result.failure}", flush=True)
    print(f"# {len(results)} benchmarks, of which {sum(bool(r.failure) for r in results)} failed: {path}", flush=True)
