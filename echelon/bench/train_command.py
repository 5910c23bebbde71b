"""The command `echelon bench train`: its options are those of Horovod's synthetic benchmark, and the layout's.

What imports torch is imported when the command runs, since every other command imports this module too.
"""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer

from echelon.bench.command import launcher, number_of_ranks, refuse, several
from echelon.launch.find import NoMPI
from echelon.launch.start import Job, run

_WHAT, _HOW, _WHERE = "What is trained", "How it is split and computed", "What is written"


def train(
    model: Annotated[str, typer.Option(help="Any preset: resnet50, vit-b16, gpt2, bert-base, …")] = "resnet50",
    changes: Annotated[
        Optional[list[str]],
        typer.Option("--set", metavar="NAME=VALUE", help="Of the model's config: layers=2.", rich_help_panel=_WHAT),
    ] = None,
    ranks: Annotated[
        Optional[int], typer.Option("-n", "--ranks", help="How many ranks to start (default: 2).", show_default=False)
    ] = None,
    hosts: Annotated[str, typer.Option(help="Where: host1,host2 or host1:4,host2:4 (default: here).")] = "",
    batch_size: Annotated[int, typer.Option(help="Samples of a rank in a batch.", rich_help_panel=_WHAT)] = 32,
    length: Annotated[
        int, typer.Option(help="Tokens of a sequence; 0: the context, 1024 at most.", rich_help_panel=_WHAT)
    ] = 0,
    image: Annotated[int, typer.Option(help="Pixels of an image's side; 0: 224.", rich_help_panel=_WHAT)] = 0,
    num_warmup_batches: Annotated[int, typer.Option(help="Batches before those that are timed.")] = 10,
    num_batches_per_iter: Annotated[int, typer.Option(help="Batches of an iteration, which is timed as one.")] = 10,
    num_iters: Annotated[int, typer.Option(help="Iterations.")] = 10,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.", rich_help_panel=_HOW)] = "fp32",
    stage: Annotated[
        int, typer.Option(help="Sharded: 0 nothing, 1 optimizer, 2 gradients too, 3 all.", rich_help_panel=_HOW)
    ] = 0,
    tp: Annotated[int, typer.Option(help="Ranks that split matrices; dp is the rest.", rich_help_panel=_HOW)] = 1,
    cp: Annotated[int, typer.Option(help="Ranks that split sequences.", rich_help_panel=_HOW)] = 1,
    compile: Annotated[bool, typer.Option("--compile", help="Compile blocks.", rich_help_panel=_HOW)] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_HOW)] = "auto",
    json: Annotated[str, typer.Option(metavar="FILE", help="The result as JSON.", rich_help_panel=_WHERE)] = "",
) -> None:
    """Measure training on synthetic data: images (tokens) a second, and how they scale from one rank to all."""
    from echelon.bench.train_options import TrainOptions, parse_changes

    try:
        options = TrainOptions(
            model=model,
            changes=parse_changes(changes or []),
            batch_size=batch_size,
            warmup_batches=num_warmup_batches,
            batches=num_batches_per_iter,
            iterations=num_iters,
            length=length,
            image=image,
            precision=precision,
            stage=stage,
            tp=tp,
            cp=cp,
            compile=compile,
            device=device,
            json=json,
        )
        size = number_of_ranks(ranks)
        options.check(size)
        mpi = launcher()
    except (ValueError, NoMPI) as error:
        refuse(error)
    if mpi is None:
        from echelon.bench.train import main

        main(options)
        return
    command = [sys.executable, "-m", "echelon.bench.train", options.to_text()]
    raise typer.Exit(run(Job(size, command, several(hosts)), mpi))
