"""The command `echelon train`: reads and checks the config, then starts ranks and follows them, or is a rank itself.

What imports torch is imported when the command runs, since every other command imports this module too.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console

from echelon.launch.cluster import ClusterSpec, NoCluster
from echelon.launch.find import Installation, NoMPI, find
from echelon.launch.identity import identity
from echelon.launch.say import fail, say
from echelon.launch.start import Job, run
from echelon.train.rows import FILE as METRICS
from echelon.train.rows import end_as_failed, read

if TYPE_CHECKING:
    from echelon.train.config import Config

_WHAT, _WHERE = "What is trained", "Where and how long"


def train(
    config: Annotated[
        Path, typer.Argument(help="A config (TOML), or the folder of a run to go on with.", show_default=False)
    ],
    ranks: Annotated[
        Optional[int], typer.Option("-n", "--ranks", min=1, help="How many ranks to start (default: 1).")
    ] = None,
    settings: Annotated[
        Optional[list[str]],
        typer.Option(
            "--set", metavar="SECTION.NAME=VALUE", help="Change a setting; repeatable.", rich_help_panel=_WHAT
        ),
    ] = None,
    init: Annotated[
        Optional[Path], typer.Option(help="Start from a Hugging Face folder (fine-tuning).", rich_help_panel=_WHAT)
    ] = None,
    folder: Annotated[
        Optional[Path],
        typer.Option(
            "--run",
            help="The run's folder (default: a new one in runs/). One that is there is gone on with.",
            rich_help_panel=_WHERE,
            show_default=False,
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0, help="How often to start again, from the last checkpoint, when ranks die.", rich_help_panel=_WHERE
        ),
    ] = 0,
    hosts: Annotated[
        str, typer.Option(help="host1,host2 or host1:4,host2:4 (default: here).", rich_help_panel=_WHERE)
    ] = "",
    cluster: Annotated[str, typer.Option(help="On an emulated cluster, as 2x2@1gbit.", rich_help_panel=_WHERE)] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the config and what each rank would hold and send; start nothing.")
    ] = False,
) -> None:
    """Train a model; a run is a folder with its config, metrics, checkpoints and report."""
    from echelon.train.checks import check, check_files
    from echelon.train.config import ConfigError, load, load_run
    from echelon.train.job_folder import new_folder, refuse_other_run

    me = identity()
    is_rank = me.launcher != "none"
    try:
        if config.is_dir():
            if folder is not None:
                raise ConfigError(f"{config} is a run's folder already: leave --run out, or give a config")
            folder, found = config, load_run(config, settings or [], init)
        else:
            found = load(config, settings or [], init)
        spec = ClusterSpec.parse(cluster) if cluster else None
        if is_rank and (ranks not in (None, me.size) or spec or hosts):
            raise ConfigError(f"this is already one of {me.size} ranks: leave -n, --hosts and --cluster out here")
        size = me.size if is_rank else spec.ranks if spec else ranks or 1
        found = check(found, size)
        if dry_run:
            if me.rank == 0:
                from echelon.train.dry import show

                show(found)
            return
        if folder is not None:
            refuse_other_run(found, folder)
        check_files(found)
        mpi = None if is_rank else find(passed_over=lambda other: say(f"passing over {other.mpiexec}"))
        if mpi is not None:
            folder = folder or new_folder(config.stem)
    except (ConfigError, NoMPI, NoCluster) as error:
        if me.rank:  # the first rank says it for all
            raise typer.Exit(2) from None
        fail(str(error), 2)
    except OSError as error:
        fail(f"{folder or 'runs'} cannot be written: {error.strerror}", 2)
    if mpi is None or folder is None:
        raise typer.Exit(_be_a_rank(found, folder, me.rank))
    names = tuple(host for host in hosts.split(",") if host)
    raise typer.Exit(_start(found, folder, Job(size, [], names, cluster=spec), mpi, restarts))


def _be_a_rank(config: Config, folder: Path | None, rank: int) -> int:
    from echelon.comm.world import end_well
    from echelon.train.faults import STOPPED
    from echelon.train.rank import train as train_here

    done, folder = train_here(config, folder, follow=True)
    end_well()
    if done and rank == 0:
        _say_what_there_is(Console(soft_wrap=True), folder)
    return 0 if done else STOPPED


def _start(config: Config, folder: Path, job: Job, mpi: Installation, restarts: int) -> int:
    """Run the ranks to their end, and again if they die; the exit code of the last time."""
    from echelon.train.config import dump
    from echelon.train.data import DataError
    from echelon.train.data.sources import tokenise
    from echelon.train.faults import STOP_FILE, STOPPED
    from echelon.train.follow import Follower
    from echelon.train.rank import REFUSED, STARTING

    since = time.time()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        again = dataclasses.replace(config.checkpoint, resume="auto")  # for ranks that are started anew
        (folder / STARTING).write_text(dump(dataclasses.replace(config, checkpoint=again)))
        if config.data.kind in ("text", "datasets"):  # not by a rank, for which the others would wait
            tokenise(config, folder / "data")
    except OSError as error:
        fail(f"{folder} cannot be written: {error.strerror}", REFUSED)
    except DataError as error:
        fail(str(error), REFUSED)
    stop = folder / STOP_FILE
    stop.unlink(missing_ok=True)
    command = [sys.executable, "-m", "echelon.train.rank", str(folder.absolute())]
    job = dataclasses.replace(job, command=command, stop=stop.absolute())
    console = Console(soft_wrap=True)
    console.print(f"run {folder}: {config.layout!r} on {job.ranks} ranks", highlight=False)
    for restart in range(restarts + 1):
        code = run(job, mpi, Follower(folder / METRICS, config.train.steps))
        if code in (0, REFUSED) or stop.exists() or _ended_as(folder) == "stopped":
            break
        if restart < restarts:
            say(f"restart {restart + 1} of {restarts}, from {_last_checkpoint(folder)}")
    (folder / STARTING).unlink(missing_ok=True)
    stop.unlink(missing_ok=True)
    if code == 0 and _ended_as(folder) == "stopped":
        say(f"stopped at {_last_checkpoint(folder)}; go on with: echelon train {folder} -n {job.ranks}")
        return STOPPED
    if code == 0:
        _say_what_there_is(console, folder)
        return code
    end_as_failed(folder / METRICS, since)
    if code != REFUSED:
        say(
            f"the run failed. To go on from {_last_checkpoint(folder)}: echelon train {folder} -n {job.ranks} "
            "(--restarts K does so by itself)"
        )
    return code


def _ended_as(folder: Path) -> str:
    """What the run last said of its end; nothing while it has said none."""
    found = read(folder / METRICS)
    return str(found[-1].get("why")) if found and found[-1]["kind"] == "end" else ""


def _last_checkpoint(folder: Path) -> str:
    from echelon.train.checkpoint_folder import complete

    steps = complete(folder / "checkpoints")
    return f"step {steps[-1]}" if steps else "the beginning: there is no checkpoint"


def _say_what_there_is(console: Console, folder: Path) -> None:
    sample = folder / "sample.txt"
    if sample.exists():
        console.print(f"a sample ({sample}):\n", highlight=False)
        console.print(sample.read_text(), highlight=False, markup=False)
    console.print(f"\nreport: {folder / 'report.html'}", highlight=False)
