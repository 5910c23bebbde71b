"""Every operation on its best road: `python benchmarks/mix.py` (as root, with iproute2, for the emulated cluster).

Tunes 2 ranks, 4 ranks and an emulated 2x2@1gbit, each with `echelon tune`, then measures the table (`auto`) beside MPI
alone, Gloo alone and Echelon without a table, over operations and sizes, also sizes that were not tuned. They take
turns. At each point the best single transport is chosen by every other round, and `auto` is judged by the rounds
between: its speed of that one's. On the cluster also whole steps: the operations of a layer of experts (MoE) and of a
recommendation model (DLRM), forward and backward.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from turns import ROOT, Rounds, interval, machine, on_ranks, summary, take_turns

KIB, MIB = 2**10, 2**20
WORLDS = {"2 ranks": ("-n", "2"), "4 ranks": ("-n", "4"), "2x2@1gbit": ("--cluster", "2x2@1gbit")}
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (256, 2 * KIB, 16 * KIB, 128 * KIB, MIB, 8 * MIB)  # every other one lies between two that were tuned
ROUNDS = 40
SINGLE = ("mpi", "gloo")
Over = Callable[[Any], object]  # something done over a group
PUBLISHED = {"MoE": "MCR-DL: +31 %", "DLRM": "MCR-DL: +25 %"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--tables", type=Path, help="a folder of tables, kept, and not measured again where they are")
    parser.add_argument("--rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        as_rank(*arguments.rank)
        return
    result: dict[str, Any] = {"what": __doc__.splitlines()[0], "rounds": ROUNDS}
    with tempfile.TemporaryDirectory() as folder:
        for world, where in WORLDS.items():
            table = tuned(world, where, arguments.tables or Path(folder))
            ranks = 0 if where[0] == "--cluster" else int(where[1])
            result[world] = on_ranks(__file__, str(table), ranks=ranks, cluster="" if ranks else where[1])
            show(world, result[world])
    if arguments.json:
        arguments.json.write_text(json.dumps(result | machine(), indent=1) + "\n")


def tuned(world: str, where: tuple[str, ...], folder: Path) -> Path:
    table = folder.absolute() / f"{world.replace(' ', '-')}.json"
    if not table.exists():
        command = [sys.executable, "-m", "echelon.cli", "tune", *where, "-o", str(table)]
        subprocess.run(command, cwd=ROOT, check=True)
    return table


def as_rank(part: Path, table: Path) -> None:
    import torch.distributed as dist

    import echelon

    dist.init_process_group("echelon")
    os.environ["ECHELON_ROUTE"] = str(table)
    groups = {"auto": dist.new_group()}
    del os.environ["ECHELON_ROUTE"]
    for transport in SINGLE:
        groups[transport] = dist.new_group()
        echelon.comm.route(groups[transport], transport)
    groups["no table"] = dist.new_group()
    points = {}
    for operation in OPERATIONS:
        for size in SIZES:
            over = operation_of(operation, size)
            judged = judge(take_turns({name: partial(over, group) for name, group in groups.items()}, ROUNDS))
            points[f"{operation} {size}"] = judged | {"road": str(groups["auto"].road(operation, size))}
    result: dict[str, Any] = {"points": points}
    if dist.group.WORLD.place.nodes > 1:
        result["steps"] = {
            name: whole(take_turns({who: partial(step, group) for who, group in groups.items()}, ROUNDS))
            for name, step in (("MoE", moe()), ("DLRM", dlrm()))
        }
    if dist.get_rank() == 0:
        part.write_text(json.dumps(result))
    dist.destroy_process_group()


def judge(times: Rounds) -> dict[str, Any]:
    """`auto` beside the transport that was best in the other half of the rounds."""
    best = min(SINGLE, key=lambda name: summary(times[name][0::2])["ms"])
    pairs = zip(times[best][1::2], times["auto"][1::2], strict=True)
    return {"best": best, "speed": interval([theirs / ours for theirs, ours in pairs])} | {
        name: summary(took) for name, took in times.items()
    }


def whole(times: Rounds) -> dict[str, Any]:
    """A step: how many times faster `auto` is than each of the others."""
    faster = {
        name: interval([theirs / ours for theirs, ours in zip(times[name], times["auto"], strict=True)])
        for name in times
        if name != "auto"
    }
    return {"faster": faster} | {name: summary(took) for name, took in times.items()}


def operation_of(operation: str, size: int) -> Over:
    """With that payload, in bytes, on tensors that all contenders share."""
    import torch
    import torch.distributed as dist

    from echelon.comm.torch_compat import newest

    count = size // 4
    whole, piece, other = torch.zeros(count), torch.zeros(count // dist.get_world_size()), torch.zeros(count)
    gather = newest("all_gather_single", "all_gather_into_tensor")
    reduce_scatter = newest("reduce_scatter_single", "reduce_scatter_tensor")
    operations: dict[str, Over] = {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda group: gather(whole, piece, group=group),
        "reduce_scatter": lambda group: reduce_scatter(piece, whole, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
    }
    return operations[operation]


def moe() -> Over:
    """Two layers of a model with experts in every other one, as DeepSpeed-MoE's: tokens go to their experts and come
    back, forward and backward; how many each expert got is summed; gradients of what all ranks hold (two attentions and
    the dense layer's MLP, 16 × hidden²) are summed. 1024 tokens a rank, hidden 512, fp32.
    """
    exchange = operation_of("all_to_all", 1024 * 512 * 4)
    counts, dense = operation_of("all_reduce", 64), operation_of("all_reduce", 16 * 512 * 512 * 4)
    return in_turn(counts, exchange, exchange, exchange, exchange, dense)


def dlrm() -> Over:
    """MLPerf's DLRM: embeddings (26 features × 128 numbers) are looked up where their table is and exchanged, forward
    and backward; gradients of the MLPs (2,368,897 parameters) are summed; the loss is averaged. 128 samples a rank.
    """
    exchange, layers = operation_of("all_to_all", 128 * 26 * 128 * 4), operation_of("all_reduce", 2_368_897 * 4)
    return in_turn(exchange, exchange, layers, operation_of("all_reduce", 4))


def in_turn(*operations: Over) -> Over:
    def step(group: Any) -> None:
        for operation in operations:
            operation(group)

    return step


def show(world: str, result: dict[str, Any]) -> None:
    speeds = {name: point["speed"] for name, point in result["points"].items()}
    mean = math.exp(sum(math.log(median) for _, median, _ in speeds.values()) / len(speeds))
    below = [name for name, (_, _, high) in speeds.items() if high < 0.9]
    print(
        f"{world}: speed of `auto` of the best single transport's, over {len(speeds)} operations and sizes: "
        f"geometric mean {mean:.3f}; wholly below 0.9: {', '.join(below) or 'none'}"
    )
    for name, point in result["points"].items():
        low, median, high = point["speed"]
        contenders = ("auto", *SINGLE, "no table")
        times = ", ".join(f"{who} {point[who]['ms']:.3f} ± {point[who]['spread']:.3f}" for who in contenders)
        print(f"  {name:24} {median:.2f} ({low:.2f}–{high:.2f}) of {point['best']:5} by {point['road']:15} ms: {times}")
    for name, step in result.get("steps", {}).items():
        ratios = step["faster"].items()
        faster = ", ".join(f"{who} {median:.2f} ({low:.2f}–{high:.2f})" for who, (low, median, high) in ratios)
        print(
            f"  a step like {name}: `auto` {step['auto']['ms']:.1f} ms, times faster than {faster} [{PUBLISHED[name]}]"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
