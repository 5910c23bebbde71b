"""For how long a checkpoint holds training up: `echelon run -n 4 benchmarks/checkpoint.py`.

A small GPT is trained (dp 2 × tp 2 on four ranks) and saved every few steps: asynchronously, as `echelon train` does,
and, in turns with it, waiting until all is on the disk. A stall is the time of `save` (and the wait) on the slowest
rank; beside it stands what the steps lose in which a checkpoint is being written on the cores that compute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from echelon.train.checks import meta_model
from echelon.train.config import load
from echelon.train.loop import Trainer

CONFIG = Path(__file__).parents[1] / "configs" / "gpt-small.toml"
EVERY, SAVES = 10, 6
WAYS = ("asynchronous", "waiting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--saves", type=int, default=SAVES, help=f"of each kind (default: {SAVES})")
    parser.add_argument("--every", type=int, default=EVERY, help=f"steps between saves (default: {EVERY})")
    arguments = parser.parse_args()
    dist.init_process_group("echelon")
    tp = 2 if dist.get_world_size() % 2 == 0 else 1
    config = load(CONFIG, [f"layout.tp={tp}", f"train.log_every={10**6}", "train.eval_every=0"])
    folder: list[str] = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder, src=0)
    trainer = Trainer(config, folder[0])
    for _ in range(arguments.every):
        trainer.take_step()
    rounds = [measured(trainer, way, arguments.every) for _ in range(arguments.saves) for way in WAYS]
    trainer.close()
    if dist.get_rank() == 0:
        result = summary(rounds, arguments.every)
        result |= {"what": __doc__.splitlines()[0], "torch": torch.__version__, "cores": os.cpu_count()}
        result |= {"ranks": dist.get_world_size(), "layout": repr(trainer.grid.layout), "every": arguments.every}
        result["parameters"] = sum(parameter.numel() for parameter in meta_model(trainer.config).parameters())
        print_table(result)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


def measured(trainer: Trainer, way: str, every: int) -> dict[str, Any]:
    """A save and the steps after it; times of the slowest rank."""
    start = time.perf_counter()
    trainer.save()
    if way == "waiting":
        trainer.checkpoints.wait()
    stall = time.perf_counter() - start
    steps = []
    for _ in range(every):
        start = time.perf_counter()
        trainer.take_step()
        steps.append(time.perf_counter() - start)
    start = time.perf_counter()
    trainer.checkpoints.wait()  # if it is not complete by now, the next save would wait for it
    stall += time.perf_counter() - start
    times = torch.tensor([stall, *steps])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return {"way": way, "stall": times[0].item(), "steps": times[1:].tolist()}


def summary(rounds: list[dict[str, Any]], every: int) -> dict[str, Any]:
    step = statistics.median(each for one in rounds if one["way"] == "waiting" for each in one["steps"])
    found: dict[str, Any] = {"step_s": step, "ways": {}}
    for way in WAYS:
        stalls = sorted(one["stall"] for one in rounds if one["way"] == way)
        lost = [sum(one["steps"]) - every * step for one in rounds if one["way"] == way]
        found["ways"][way] = {
            "stall_s": statistics.median(stalls),
            "stalls_s": stalls,
            "share": statistics.median(stalls) / (step * every),
            "lost_s": statistics.median(lost),
        }
    return found


def print_table(result: dict[str, Any]) -> None:
    console = Console(width=120)
    console.print(
        f"{result['parameters']:,} parameters, {result['layout']}; a step takes {result['step_s'] * 1e3:.0f} ms, "
        f"a save every {result['every']} steps",
        highlight=False,
    )
    table = Table("saved", "stall, ms", "largest", "of step × interval", "the steps after it lose, ms")
    for way, figures in result["ways"].items():
        stall, largest = figures["stall_s"] * 1e3, figures["stalls_s"][-1] * 1e3
        lost = f"{figures['lost_s'] * 1e3:.0f}"
        table.add_row(way, f"{stall:.1f}", f"{largest:.1f}", f"{figures['share']:.1%}", lost)
    console.print(table)


if __name__ == "__main__":
    main()
