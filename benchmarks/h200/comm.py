"""CUDA tensors over MPI, ranks sharing one GPU: `python3 benchmarks/h200/comm.py`.

Starts its own ranks, once with the GPU's time sliced between the processes and once under NVIDIA's MPS. Measures
all_reduce through pinned host memory and through the GPU's own, messages, both beside the limit of a pinned copy; how
much of an asynchronous all_reduce hides behind a matrix product, on the host and on the GPU; DDP on four ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
MIB = 2**20
SIZES = (1, 4, 16, 64, 256)  # MiB
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # where a started rank writes its part
    arguments = parser.parse_args()
    if arguments.rank:
        as_rank(arguments.rank)
        return
    result: dict[str, Any] = {"what": __doc__.splitlines()[0]}
    for name, sharing in (("time-sliced", contextlib.nullcontext), ("MPS", mps)):
        with sharing():
            for size in (2, 4):
                print(f"{name}, {size} ranks", flush=True)
                result[f"{name}, {size} ranks"] = on_ranks(size)
    print_tables(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def on_ranks(size: int) -> dict[str, Any]:
    from echelon.launch.find import find
    from echelon.launch.start import Job, run

    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        code = run(Job(size, [sys.executable, __file__, "--rank", str(part)]), find())
        if code:
            sys.exit(code)
        answer: dict[str, Any] = json.loads(part.read_text())
        return answer


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """NVIDIA's service by which kernels and copies of several processes run side by side."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        control = shutil.which("nvidia-cuda-mps-control")
        if control is None:
            sys.exit("nvidia-cuda-mps-control was not found")
        subprocess.run([control, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", check=False, timeout=60)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def as_rank(part: Path) -> None:
    import torch
    import torch.distributed as dist

    import echelon  # noqa: F401 (registers the backend, where it is not installed)

    torch.cuda.set_device(0)
    dist.init_process_group("echelon")
    result = {
        "pinned copy, GiB/s": pinned_copy(),
        "all_reduce": all_reduce(),
        "send": send(),
        "overlap": {"host": overlap("cpu", 1024), "GPU": overlap("cuda", 4096)},
        "ddp": ddp(),
    }
    if dist.get_rank() == 0:
        part.write_text(json.dumps(result))
    dist.destroy_process_group()


def timed(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds, of the slowest rank."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - start) / repeats * 1e3])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measured(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """The contenders take turns; median and spread between the quartiles, in milliseconds."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(timed(call, repeats))
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
    return {name: {"median": q[1], "spread": q[2] - q[0]} for name, q in quartiles.items()}


def pinned_copy() -> dict[str, float]:
    """The limit of everything that is staged, with the GPU to one rank."""
    import torch
    import torch.distributed as dist

    host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    speeds = {}
    if dist.get_rank() == 0:
        for name, target, source in (("to the host", host, device), ("to the device", device, host)):
            target.copy_(source, non_blocking=True)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                target.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            speeds[name] = 20 * 64 / 1024 / (begin.elapsed_time(end) / 1e3)
    dist.barrier()
    return speeds


def all_reduce() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    devices = dist.group.WORLD._devices
    device = torch.device("cuda", 0)
    dist.all_reduce(torch.ones(1, device=device))
    ways = {"shared GPU": devices.for_collectives(device), "staged": devices.for_messages(device)}
    if ways["shared GPU"] is ways["staged"]:
        sys.exit("the ranks cannot show each other the GPU's memory")

    def over(way: str, x: Any) -> None:
        devices._collectives[device] = ways[way]
        dist.all_reduce(x)

    result = {}
    for size in (1 / 256, *SIZES):
        x = torch.zeros(int(size * MIB) // 4, device=device)
        calls = {way: partial(over, way, x) for way in ways}
        result[str(size)] = measured(calls, 20 if size < 1 else max(1, int(16 / size)))
    devices._collectives[device] = ways["shared GPU"]
    return result


def send() -> dict[str, Any]:
    """Rank 0 sends, rank 1 receives and answers with one element."""
    import torch
    import torch.distributed as dist

    from echelon.comm.transports import messages

    rank = dist.get_rank()
    answer = torch.zeros(1)
    result = {}
    least, ways = messages.SHARED_FROM, {"shared GPU": 0, "staged": sys.maxsize}
    for size in (1 / 16, 1 / 4, *SIZES):
        x = torch.zeros(int(size * MIB) // 4, device="cuda")

        def message(way: str, x: Any = x) -> None:
            messages.SHARED_FROM = ways[way]
            if rank == 0:
                dist.send(x, 1)
                dist.recv(answer, 1)
            elif rank == 1:
                dist.recv(x, 0)
                torch.cuda.current_stream().synchronize()
                dist.send(answer, 0)

        result[str(size)] = measured({way: partial(message, way) for way in ways}, max(1, min(int(16 / size), 20)))
    messages.SHARED_FROM = least
    return result


def overlap(device: str, side: int) -> dict[str, Any]:
    """A 64 MiB all_reduce behind matrix products of about the same duration: of the shorter, the share that hides."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max((os.cpu_count() or 1) // dist.get_world_size() - 2, 1))
    x, a = torch.zeros(16 * MIB, device=device), torch.randn(side, side, device=device)

    def reduce() -> None:
        dist.all_reduce(x)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a)

    def both(times: int) -> None:
        work = dist.all_reduce(x, async_op=True)
        multiply(times)
        work.wait()

    ratio = measured({"all_reduce": reduce, "products": partial(multiply, 10)}, 1)
    count = torch.tensor([max(int(10 * ratio["all_reduce"]["median"] / ratio["products"]["median"]), 1)])
    dist.broadcast(count, 0)
    products = int(count)
    calls = {"all_reduce": reduce, "products": partial(multiply, products), "both": partial(both, products)}
    times = measured(calls, 1)
    comm, compute, together = (times[name]["median"] for name in calls)
    torch.set_num_threads(1)
    return times | {"hidden": (comm + compute - together) / min(comm, compute)}


def ddp() -> dict[str, Any]:
    """The same global batch on all ranks together and on one alone: milliseconds a step, and the losses' difference."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()

    def net() -> nn.Module:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(2048, 16)).cuda()

    def steps(model: nn.Module, share: int, of: int, count: int) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for step in range(count):
            generator = torch.Generator(device="cuda").manual_seed(step)
            x, y = (torch.randn(4096, n, device="cuda", generator=generator).chunk(of)[share] for n in (2048, 16))
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    together = DistributedDataParallel(net())
    losses = torch.tensor(steps(together, rank, size, 10))
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    result: dict[str, Any] = {"all ranks, ms": timed(lambda: steps(together, rank, size, 10), 1) / 10}
    alone_losses, alone_ms = [0.0] * 10, 0.0
    if rank == 0:  # with the GPU to itself
        alone = net()
        alone_losses = steps(alone, 0, 1, 10)
        torch.cuda.synchronize()
        start = time.perf_counter()
        steps(alone, 0, 1, 10)
        torch.cuda.synchronize()
        alone_ms = (time.perf_counter() - start) * 100
    dist.barrier()
    difference = max(abs(a - b) for a, b in zip(losses.tolist(), alone_losses, strict=True))
    return result | {"one rank, ms": alone_ms, "largest difference of losses": difference}


def print_tables(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    for name, part in result.items():
        if not isinstance(part, dict) or "ddp" not in part:
            continue
        table = Table(title=name, title_justify="left")
        for column in ("", "MiB", "ms", "± ms", "GB/s"):
            table.add_column(column, justify="right")
        for operation in ("all_reduce", "send"):
            for size, ways in part[operation].items():
                for way, figure in ways.items():
                    speed = float(size) * MIB / figure["median"] / 1e6
                    cells = f"{figure['median']:.3f}", f"{figure['spread']:.3f}", f"{speed:.2f}"
                    table.add_row(f"{operation}, {way}", f"{float(size):g}", *cells)
        console.print(table)
        console.print("pinned copy, GiB/s:", part["pinned copy, GiB/s"])
        console.print({place: f"{overlap['hidden']:.0%} hidden" for place, overlap in part["overlap"].items()})
        console.print(part["ddp"])


if __name__ == "__main__":
    main()
