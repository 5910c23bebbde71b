"""Two nodes joined by 1 Gbit/s, emulated on one machine: `python benchmarks/cluster.py` (as root, with iproute2).

Starts its own ranks. On 2x2@1gbit an all_reduce over Echelon and over Gloo: the bytes that crossed the link, by the
interface's own counter, and the time, beside what must cross and how long the link needs for that. On 2x1@1gbit how
much of an asynchronous all_reduce hides behind matrix products. Contenders take turns, and a time is that of the
slowest rank; medians over the rounds, with the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MIB = 2**20
SIZES = (1, 4, 16, 64)  # MiB
ROUNDS = 9
RATE = 10**9  # bits a second
NODES = 2
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--plot", type=Path, help="where to draw it")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)  # what a started rank measures, and where it goes
    arguments = parser.parse_args()
    if arguments.rank:
        as_rank(arguments.rank[0], Path(arguments.rank[1]))
        return
    import torch

    from echelon.launch.find import find

    result = {
        "what": __doc__.splitlines()[0],
        "mpi": find().version,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "all_reduce on 2x2@1gbit": on_cluster("2x2@1gbit", "all_reduce"),
        "overlap on 2x1@1gbit": on_cluster("2x1@1gbit", "overlap"),
    }
    print_tables(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)


def on_cluster(text: str, measure: str) -> dict[str, Any]:
    from echelon.launch.cluster import ClusterSpec, NoCluster
    from echelon.launch.find import find
    from echelon.launch.start import Job, run

    os.environ["PYTHONPATH"] = str(ROOT)
    spec = ClusterSpec.parse(text)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        try:
            code = run(Job(spec.ranks, [sys.executable, __file__, "--rank", measure, str(part)], cluster=spec), find())
        except NoCluster as error:
            sys.exit(str(error))
        if code:
            sys.exit(code)
        answer: dict[str, Any] = json.loads(part.read_text())
        return answer


def as_rank(measure: str, part: Path) -> None:
    import torch.distributed as dist

    import echelon  # noqa: F401 (registers the backend, where it is not installed)

    dist.init_process_group("echelon")
    groups = {"echelon": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    result = all_reduce(groups) if measure == "all_reduce" else overlap(groups)
    if dist.get_rank() == 0:
        part.write_text(json.dumps(result))
    dist.destroy_process_group()


def largest(value: float) -> float:
    """Over all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def once(call: Call, repeats: int) -> tuple[float, float]:
    """One call's milliseconds on the slowest rank, and the bytes that the busiest node sent for it."""
    import torch.distributed as dist

    dist.barrier()
    sent, start = int(SENT.read_text()), time.perf_counter()
    for _ in range(repeats):
        call()
    took = time.perf_counter() - start
    dist.barrier()
    return largest(took) / repeats * 1e3, largest(int(SENT.read_text()) - sent) / repeats


def measured(calls: dict[str, Call], rounds: int, repeats: int = 1) -> dict[str, list[tuple[float, float]]]:
    """What `once` told of every call, round by round."""
    for call in calls.values():
        call()
    told: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            told[name].append(once(call, repeats))
    return told


def summary(told: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    result = {}
    for name, rounds in told.items():
        low, median, high = statistics.quantiles([took for took, _ in rounds], n=4)
        result[name] = {"ms": median, "spread": high - low, "sent": statistics.median(sent for _, sent in rounds)}
    return result


def all_reduce(groups: dict[str, Any]) -> dict[str, Any]:
    """Several calls in a row where they are short: after a rest, the link lets a millisecond's worth pass at once."""
    import torch
    import torch.distributed as dist

    result: dict[str, Any] = {"a plain TCP stream, Gbit/s": stream(64 * MIB, groups["gloo"]), "sizes": {}}
    for size in SIZES:
        x = torch.zeros(size * MIB // 4)
        calls = {name: partial(dist.all_reduce, x, group=group) for name, group in groups.items()}
        must = 2 * (NODES - 1) / NODES * x.nbytes
        limit = {"sent": must, "ms": must * 8 / RATE * 1e3}
        result["sizes"][str(size)] = {"limit": limit} | summary(measured(calls, ROUNDS, max(1, 16 // size)))
    return result


def stream(size: int, quiet: Any) -> float:
    """From the first rank to the last, past all libraries; the others wait in `quiet`, where waiting takes no core."""
    import torch.distributed as dist

    last = dist.get_world_size() - 1
    address = [socket.gethostname(), 0]
    gbits = []
    if dist.get_rank() == last:
        listener = socket.create_server((address[0], 0))
        address[1] = listener.getsockname()[1]
    dist.broadcast_object_list(address, last)
    if dist.get_rank() == last:
        for _ in range(ROUNDS):
            sender = listener.accept()[0]
            while sender.recv(MIB):
                pass
            sender.close()
    elif dist.get_rank() == 0:
        data = bytes(size)
        for _ in range(ROUNDS):
            start = time.perf_counter()
            with socket.create_connection((address[0], address[1])) as receiver:
                receiver.sendall(data)
                receiver.shutdown(socket.SHUT_WR)
                receiver.recv(1)
            gbits.append(size * 8 / (time.perf_counter() - start) / 1e9)
    dist.barrier(quiet)
    return statistics.median(gbits) if gbits else 0.0


def overlap(groups: dict[str, Any]) -> dict[str, Any]:
    """A 16 MiB all_reduce behind matrix products of about the same duration: of the shorter, the share that hides."""
    import torch
    import torch.distributed as dist

    x, a = torch.zeros(4 * MIB), torch.randn(512, 512)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a)

    def both(group: Any, times: int) -> None:
        work = dist.all_reduce(x, group=group, async_op=True)
        multiply(times)
        work.wait()

    first = summary(measured({"all_reduce": partial(dist.all_reduce, x), "products": partial(multiply, 10)}, ROUNDS))
    count = torch.tensor([max(int(10 * first["all_reduce"]["ms"] / first["products"]["ms"]), 1)])
    dist.broadcast(count, 0)
    products = int(count)
    calls: dict[str, Call] = {"products": partial(multiply, products)}
    for name, group in groups.items():
        calls[name] = partial(dist.all_reduce, x, group=group)
        calls[f"{name} and products"] = partial(both, group, products)
    told = measured(calls, 5 * ROUNDS)
    times = {name: [took for took, _ in rounds] for name, rounds in told.items()}
    hidden = {}
    for name in groups:  # within a round, so that other work on the machine hits all three alike
        trios = zip(times[name], times["products"], times[f"{name} and products"], strict=True)
        shares = [(comm + compute - together) / min(comm, compute) for comm, compute, together in trios]
        low, median, high = statistics.quantiles(shares, n=4)
        hidden[name] = {"median": median, "spread": high - low}
    return {"times": summary(told), "hidden": hidden}


def print_tables(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    part = result["all_reduce on 2x2@1gbit"]
    table = Table(title="all_reduce on 2x2@1gbit", title_justify="left")
    for column in ("MiB", "", "ms", "± ms", "times the limit", "MB sent by a node", "times what must"):
        table.add_column(column, justify="right")
    for size, rows in part["sizes"].items():
        limit = rows["limit"]
        for name, row in rows.items():
            spread = f"{row['spread']:.1f}" if "spread" in row else ""
            cells = f"{row['ms']:.1f}", spread, f"{row['ms'] / limit['ms']:.2f}"
            table.add_row(size, name, *cells, f"{row['sent'] / 1e6:.2f}", f"{row['sent'] / limit['sent']:.2f}")
    console.print(table)
    console.print(f"a plain TCP stream: {part['a plain TCP stream, Gbit/s']:.3f} Gbit/s")
    overlapped = result["overlap on 2x1@1gbit"]
    for name, row in overlapped["times"].items():
        console.print(f"{name}: {row['ms']:.0f} ms ± {row['spread']:.0f}")
    console.print(
        {name: f"{share['median']:.0%} ± {share['spread']:.0%} hidden" for name, share in overlapped["hidden"].items()}
    )


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = result["all_reduce on 2x2@1gbit"]["sizes"]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    contenders = {"echelon": ("Echelon (MPI)", "C0o-"), "gloo": ("Gloo", "C1s-")}
    for axis, key, title in (
        (axes[0], "ms", "time, as a multiple of the link's limit"),
        (axes[1], "sent", "bytes over the link, of what must cross"),
    ):
        for name, (label, style) in contenders.items():
            multiples = [rows[name][key] / rows["limit"][key] for rows in sizes.values()]
            axis.plot([int(size) for size in sizes], multiples, style, label=label)
        axis.axhline(1, color="k", linestyle="--")
        axis.set(xscale="log", ylim=(0, None), xlabel="all_reduce on 2x2@1gbit, MiB", title=title)
        axis.set_xticks(SIZES, map(str, SIZES))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    overlapped = result["overlap on 2x1@1gbit"]
    rows = ["products", *(name + rest for name in contenders for rest in ("", " and products"))]
    axes[2].barh(rows, [overlapped["times"][row]["ms"] for row in rows], color=["C7", "C0", "C0", "C1", "C1"])
    axes[2].invert_yaxis()
    hidden = ", ".join(f"{share['median']:.0%} ({name})" for name, share in overlapped["hidden"].items())
    axes[2].set(xlabel="16 MiB on 2x1@1gbit, ms (median)", title=f"hidden: {hidden}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
