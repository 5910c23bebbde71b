"""The command `echelon tune`. What imports torch is imported when it runs, since every other command imports this."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from echelon.bench.command import launcher, several
from echelon.launch.cluster import ClusterSpec, NoCluster
from echelon.launch.find import NoMPI
from echelon.launch.identity import identity
from echelon.launch.say import fail
from echelon.launch.start import Job, run

_SIZES = "4:16M"


def tune(
    ranks: Annotated[
        Optional[int], typer.Option("-n", "--ranks", min=2, help="How many ranks to start (default: 2).")
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="On an emulated cluster: nodes x ranks @ rate [+ latency], as 2x2@1gbit.")
    ] = "",
    hosts: Annotated[str, typer.Option(help="Where: host1,host2 or host1:4,host2:4 (default: here).")] = "",
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="The table's file, beside the copy kept for `auto`.")
    ] = None,
    sizes: Annotated[str, typer.Option("-m", metavar="[MIN:]MAX", help="Bytes: 4:16M, in steps of four.")] = _SIZES,
    operations: Annotated[
        str, typer.Option(help="Of all_reduce, all_gather, …; several with commas (default: all).")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    samples: Annotated[int, typer.Option(min=1, help="How often each road is timed at each size.")] = 15,
    show: Annotated[
        Optional[Path], typer.Option("--show", metavar="TABLE", help="Draw a table that was measured, and end.")
    ] = None,
) -> None:
    """Measure every operation and size on every road (MPI, Gloo, NCCL; ring, two levels, shared memory), and write the
    table that routes are read from: `ECHELON_ROUTE=routes.json`, or `ECHELON_ROUTE=auto` for this machine's newest.

    Interrupted, the same command goes on where it was.
    """
    from echelon.comm.routes import OPERATIONS, NoRoute
    from echelon.comm.tables import VARIABLE, read
    from echelon.tune.show import show as draw

    try:
        if show is not None:
            draw(read(show), Console())
            return
        if identity().launcher != "none":
            raise NoRoute("`echelon tune` starts its ranks itself: call it alone, with -n, --hosts or --cluster")
        chosen = several(operations) or OPERATIONS
        for name in chosen:
            if name not in OPERATIONS:
                raise NoRoute(f"there is no operation {name!r}: there are {', '.join(OPERATIONS)}")
        spec = ClusterSpec.asked(cluster, ranks, several(hosts))
        if output is not None and output.is_dir():
            raise NoRoute(f"{output} is a folder: -o wants a file, such as {output / 'routes.json'}")
        mpi = launcher()
        assert mpi is not None  # this is no rank
        command = _command(output, sizes, chosen, device, samples)
        os.environ.pop(VARIABLE, None)  # all roads are measured, whichever are in force
        code = run(Job(spec.ranks if spec else ranks or 2, command, several(hosts), cluster=spec), mpi)
    except (ValueError, NoMPI, NoCluster) as error:
        fail(str(error), 2)
    if code == 0 and output is not None:
        draw(read(output), Console())
    raise typer.Exit(code)


def _command(output: Path | None, sizes: str, operations: tuple[str, ...], device: str, samples: int) -> list[str]:
    import torch

    from echelon.bench.options import parse_sizes
    from echelon.tune.rank import TuneOptions

    low, high = parse_sizes(sizes)
    smallest, largest = low or 4, high or 2**24
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device {device}: take cpu, or cuda where PyTorch sees a GPU")
    chosen = [size for power in range(32) if (size := smallest * 4**power) <= largest]
    console = Console(stderr=True)
    options = TuneOptions(
        str(output.absolute()) if output else "",
        tuple(chosen),
        operations,
        device,
        samples,
        console.width if console.is_terminal else 0,
    )
    return [sys.executable, "-m", "echelon.tune.rank", options.to_text()]
