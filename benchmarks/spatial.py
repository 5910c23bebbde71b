"""Images in tiles beside one process: `python3 benchmarks/spatial.py [--json FILE] [PART ...]`.

Starts its own ranks, by MPI where it is found and else by torchrun, and shares the machine's cores among them.
ResNet-50 and an AmoebaNet-D of 6 layers and 64 filters, fp32, on random images; 4 tiles are 4 rows. Each part can be
asked for alone:

- memory: the bytes that one training pass saves for its backward pass, of a tile and of one process, at 1024² and
  2048²; and the peak of what a process needs beside what it had before, also where the C library gives back what was
  freed instead of keeping it for later (MALLOC_MMAP_THRESHOLD_)
- speed: images a second of SP+PP (4 tiles, then one rank) beside PP on as many ranks (5 stages with equal products),
  8 microbatches of one image at 1024²
- halo: the share of a training pass that goes into the exchange of borders, with what needs nobody computed meanwhile
  and without, at 1024²; also of 2 tiles on an emulated cluster of two nodes joined by 1 Gbit/s (which needs root)
- largest: the largest square image whose training pass stays within 3 GiB a process, of one process and of 4 tiles
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from echelon.launch.cluster import ClusterSpec, NoCluster  # noqa: E402 (where nothing is installed, it is found here)
from echelon.launch.find import NoMPI, find  # noqa: E402
from echelon.launch.start import Job, run  # noqa: E402

MODELS = ("resnet", "amoebanet")
LIMIT = 3 * 2**30


def memory() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in MODELS:
        for side in (1024, 2048):
            one, tiles = start(1, "memory", model, side)[0], start(4, "memory", model, side)
            square = start(4, "memory of 2 × 2", model, side) if side == 1024 else []
            with given_back():
                one_back, tiles_back = start(1, "memory", model, side)[0], start(4, "memory", model, side)
            found[f"{model} {side}²"] = {
                "saved, MiB": {"one process": one["saved"] / 2**20, "a tile": [x["saved"] / 2**20 for x in tiles]},
                "saved, of one process": max(each["saved"] for each in tiles) / one["saved"],
                "the same, of 2 × 2 tiles": [each["saved"] / one["saved"] for each in square],
                "peak, MiB": {"one process": one["peak"] / 2**20, "a tile": [x["peak"] / 2**20 for x in tiles]},
                "peak, of one process": max(each["peak"] for each in tiles) / one["peak"],
                "the same, freed memory given back": max(each["peak"] for each in tiles_back) / one_back["peak"],
                "one process's then, of what it is else": one_back["peak"] / one["peak"],
            }
    return found


def speed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in MODELS:
        told = {way: start(5, way, model, 1024)[0] for way in ("sp+pp", "pp")}
        found[model] = told | {"times PP": told["sp+pp"]["images/s"] / told["pp"]["images/s"]}
    return found


def halo() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in MODELS:
        for ranks, cluster in ((4, ""), (2, "2x1@1gbit")):
            try:
                told = start(ranks, "halo", model, 1024, cluster)
            except NoCluster as error:
                print(f"not on a cluster: {error}", flush=True)
                continue
            ways = {way: _shares(each[way] for each in told) for way in ("overlapped", "one after the other")}
            found[f"{model}, {ranks} tiles{f' on {cluster}' if cluster else ''}"] = ways
    return found


def _shares(ranks: Iterable[dict[str, list[float]]]) -> dict[str, Any]:
    """Of the slowest rank, medians and the spread of passes."""
    passes, shares = [], []
    for each in ranks:
        passes.append(sorted(each["passes"]))
        shares.append(statistics.median(map(operator.truediv, each["exchanges"], each["passes"])))
    slowest = max(passes, key=statistics.median)
    return {"share": max(shares), "pass, s": statistics.median(slowest), "least and most": [slowest[0], slowest[-1]]}


def largest() -> dict[str, Any]:
    found: dict[str, Any] = {"limit, GiB": LIMIT / 2**30}
    for model in MODELS:
        one, tiles = (_largest(ranks, model) for ranks in (1, 4))
        found[model] = {"one process": one, "4 tiles": tiles, "times the pixels": (tiles / one) ** 2}
    return found


def _largest(ranks: int, model: str) -> int:
    """To 8 pixels, each side tried by new processes: what one leaves behind makes the next need more."""

    def fits(side: int) -> bool:
        return max(each["peak"] for each in start(ranks, "memory", model, side)) <= LIMIT

    small = max(each["peak"] for each in start(ranks, "memory", model, 512))
    side = int(512 * math.sqrt(LIMIT / small)) // 8 * 8  # too little, since not everything grows with the image
    step = 64
    while not fits(side):
        side -= step
    while step >= 8:
        if fits(side + step):
            side += step
        else:
            step //= 2
    return side


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"memory": memory, "speed": speed, "halo": halo, "largest": largest}


@contextmanager
def given_back() -> Iterator[None]:
    """In here ranks are started whose memory is the system's again once it is freed, from 1 MiB on."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    try:
        yield
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def start(ranks: int, part: str, model: str, side: int, cluster: str = "") -> list[dict[str, Any]]:
    """What each rank has found."""
    threads = max(len(os.sched_getaffinity(0)) // ranks, 1)
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        script = [str(Path(__file__).with_name("spatial_ranks.py")), part, model, str(side), folder]
        if code := _run(ranks, script, cluster):
            sys.exit(code)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _run(ranks: int, script: list[str], cluster: str) -> int:
    try:
        mpi = find()
    except NoMPI as error:
        if cluster:
            raise NoCluster(str(error)) from error
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        return subprocess.run([*launcher, *script], check=False).returncode
    return run(Job(ranks, [sys.executable, *script], cluster=ClusterSpec.parse(cluster) if cluster else None), mpi)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/spatial.json", help="where to write")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    import torch

    found: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    found |= {"what": __doc__.splitlines()[0], "torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    for name in arguments.parts:
        found[name] = PARTS[name]()
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
