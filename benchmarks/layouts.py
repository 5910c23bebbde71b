"""One model on two nodes of two ranks, joined by 1 Gbit/s: six layouts (`python benchmarks/layouts.py`, as root).

Emulates the cluster and starts its own ranks. For each layout the time of a training step, the payload that
`plan/traffic.py` predicts beside the one recorded, and what really crossed the link, by the interface's own counter.
Steps of all layouts take turns; a time is that of the slowest rank; medians, with the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CLUSTER = "2x2@1gbit"
ROUNDS = 9
BATCH, LENGTH = 8, 128
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
# Ranks 0 and 1 share a node, and so do 2 and 3: `tp` and what is innermost stays inside.
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "dp 4, replicated": ({"dp": 4}, 0),
    "dp 4, stage 2": ({"dp": 4}, 2),
    "dp 4, stage 3": ({"dp": 4}, 3),
    "dp 4, hybrid: sharded in a node": ({"dp": 4, "replicate": 2}, 3),
    "dp 2 × tp 2": ({"dp": 2, "tp": 2}, 0),
    "dp 2 × cp 2 (ring)": ({"dp": 2, "cp": 2}, 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # what a started rank is given
    arguments = parser.parse_args()
    if arguments.rank:
        as_rank(arguments.rank)
        return
    import torch

    from echelon.launch.cluster import ClusterSpec, NoCluster
    from echelon.launch.find import find
    from echelon.launch.start import Job, run

    os.environ["PYTHONPATH"] = str(ROOT)
    spec = ClusterSpec.parse(CLUSTER)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        try:
            code = run(Job(spec.ranks, [sys.executable, __file__, "--rank", str(part)], cluster=spec), find())
        except NoCluster as error:
            sys.exit(str(error))
        if code:
            sys.exit(code)
        rows = json.loads(part.read_text())
    heading = {"what": __doc__.splitlines()[0], "mpi": find().version, "torch": torch.__version__}
    result = heading | {"cores": os.cpu_count(), "batch": BATCH, "length": LENGTH, "layouts": rows}
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def as_rank(part: Path) -> None:
    import torch
    import torch.distributed as dist

    import echelon  # noqa: F401 (registers the backend, where it is not installed)

    torch.set_num_threads(1)
    dist.init_process_group("echelon")
    steps = {name: prepared(degrees, stage) for name, (degrees, stage) in LAYOUTS.items()}
    rows = {name: counted(name, step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(largest(time.perf_counter() - start) * 1e3)
    for name, row in rows.items():
        low, median, high = statistics.quantiles(times[name], n=4)
        row |= {"ms": median, "spread": high - low}
    if dist.get_rank() == 0:
        part.write_text(json.dumps(rows))
    dist.destroy_process_group()


def model() -> Any:
    from echelon.models.gpt import GPT, GPTConfig

    return GPT(GPTConfig(vocabulary=4096, context=LENGTH, dim=256, layers=4, heads=8))


def prepared(degrees: dict[str, int], stage: int) -> Any:
    """A step of training in a layout, ready to be called."""
    import torch

    from echelon.parallel import batch
    from echelon.parallel.apply import Strategies, parallelize
    from echelon.parallel.layout import Layout
    from echelon.parallel.optimizer import Optimizer

    grid = Layout(**degrees).build()
    trained = parallelize(model(), grid, Strategies(stage=stage))  # type: ignore[arg-type]
    optimizer = Optimizer(partial(torch.optim.AdamW, lr=1e-3), trained)
    tokens = torch.randint(4096, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    given = batch.part({"tokens_BS": tokens[:, :-1], "targets_BS": tokens[:, 1:]}, grid)

    def step() -> None:
        loss = trained(**given) / batch.count(given["targets_BS"], grid.mesh("data"))
        loss.backward()
        optimizer.step()

    return step


def counted(name: str, step: Any) -> dict[str, Any]:
    """Payload predicted and recorded by the first rank, by dimension, and the bytes that a node sent over its link."""
    import torch
    import torch.distributed as dist

    import echelon
    from echelon.parallel.apply import Strategies
    from echelon.parallel.layout import Layout
    from echelon.plan.traffic import traffic

    step()
    dist.barrier()
    before = int(SENT.read_text())
    with echelon.comm.record() as log:
        step()
    dist.barrier()
    crossed = largest(int(SENT.read_text()) - before)
    recorded: dict[str, int] = {}
    for record in log:
        recorded[record.dimension] = recorded.get(record.dimension, 0) + record.payload
    degrees, stage = LAYOUTS[name]
    with torch.device("meta"):
        shapes = model()
    planned = traffic(shapes, Layout(**degrees), Strategies(stage=stage), BATCH, LENGTH)  # type: ignore[arg-type]
    predicted: dict[str, int] = {}
    for (dimension, _), payload in planned.items():
        predicted[dimension] = predicted.get(dimension, 0) + payload
    return {"predicted": predicted, "recorded": recorded, "link": crossed}


def largest(value: float) -> float:
    """Over all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def print_table(rows: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"a training step on {CLUSTER}", title_justify="left")
    for column in ("layout", "ms", "± ms", "payload predicted, MB", "recorded", "sent by a node, MB"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for name, row in rows.items():
        predicted = ", ".join(f"{key} {value / 1e6:.2f}" for key, value in row["predicted"].items() if value > 99)
        same = "the same" if row["predicted"] == row["recorded"] else str(row["recorded"])
        table.add_row(name, f"{row['ms']:.0f}", f"{row['spread']:.0f}", predicted, same, f"{row['link'] / 1e6:.1f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
