"""When things go wrong: a clear error that names the right rank and operation, never a hang, and no process left.

Each kind once here; in `make test-all` twenty times each, at random moments, on two to four ranks.
"""

from __future__ import annotations

import random
import re
import sys
import time

import pytest

from echelon.launch.find import find
from echelon.launch.start import Job, command_line
from tests.comm.faults import LENGTH, OPERATIONS, Fault, program
from tests.launch.jobs import ROOT, echelon, run
from tests.pool import alive

SCRIPT = ROOT / "tests/comm/scripts/fault.py"
# What the report must say of the victim and of the operation it did not come to.
SAYS = {
    "killed": r"rank {victim} died without a word",
    "raises": r"rank {victim} raised ValueError: on purpose",
    "exits": r"rank {victim} exited with code 7",
    "leaves": r"\(number \d+\) in the world can never complete: rank {victim} ended",
    "vanishes": r"(rank {victim} died without a word|can never complete: rank {victim} died)",
    "late": r"\(number \d+\) in the world was not complete after the timeout of 3 s: rank {victim} had not arrived",
    "silent": r"was not complete after the timeout of 3 s(?s:.*)rank {victim}: waiting for a message from rank {next}",
    # Unchecked, some pairs of operations exchange their bytes all the same, or MPI itself complains.
    "another": r"do not match: number {number} in the world is .*{another} of float32 on rank {victim}|rank \d+ raised",
    "another-checked": r"the ranks' calls do not match: .*rank {victim}: {another}",
    "shape-checked": r"the ranks' calls do not match: .*rank {victim}: all_reduce\(float32\[7\], sum\)",
    "dtype-checked": r"the ranks' calls do not match: .*rank {victim}: all_reduce\(int32\[6\], sum\)",
}
CODES = {
    "killed": (9, 137),
    "exits": (7,),
    "vanishes": (1, 9, 137),
}  # where the rank told nothing, MPI's launcher decides
_NUMBERED = rf"\b({'|'.join(OPERATIONS)})\b[^()\n]*?\(number (\d+)\)"
CHECKED = [kind for kind in SAYS if kind.endswith("-checked")]


def suffer(fault: Fault, size: int) -> None:
    """Run the program with the fault under `echelon run` and look at what remains of it."""
    check = "1" if fault.kind in CHECKED else "0"
    arguments = (fault.kind, fault.victim, fault.moment, fault.seed)
    started = time.monotonic()
    job = echelon("run", "-n", size, SCRIPT, *arguments, timeout=60, ECHELON_CHECK=check)
    took = time.monotonic() - started
    text = job.stderr[job.stderr.rindex("echelon: ") :] if "echelon: " in job.stderr else job.stderr
    steps = program(fault)
    says = SAYS[fault.kind].format(
        victim=fault.victim,
        number=fault.moment + 1,
        next=(fault.victim + 1) % size,
        another=next(name for name in OPERATIONS if name != steps[fault.moment]),
    )
    context = f"{fault} on {size} ranks, code {job.returncode}, {took:.1f} s\n{job.stdout}\n{job.stderr}"
    assert re.search(says, text), context
    assert job.returncode in CODES.get(fault.kind, (1,)), context
    # Every operation that is named has its right number. The survivors are at the victim's, or a little further: the
    # root of a broadcast waits for nobody. The victim's last calls may have been asynchronous, and not have begun.
    named = [(name, int(number)) for name, number in re.findall(_NUMBERED, text)]
    wrong = [pair for pair in named if steps[pair[1] - 1] != pair[0]]
    if not fault.kind.startswith("another"):
        assert not wrong, context
        begun = max(number for number in range(fault.moment + 1) if number == 0 or steps[number - 1] != "all_reduce")
        assert begun <= max(number for _, number in named), context
    processes = [int(number) for number in re.findall(r"PROCESS (\d+)", job.stdout)]
    assert len(processes) == size, context
    assert not any(map(alive, processes)), context


@pytest.mark.parametrize("kind", SAYS)
def test_fault(kind):
    suffer(Fault(kind, victim=1, moment=57, seed=3), size=3 if kind == "another" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", SAYS)
def test_fault_at_random_moments(kind, seed):
    chosen = random.Random(f"{kind} {seed}")
    size = chosen.randint(2, 4)
    suffer(Fault(kind, chosen.randrange(size), chosen.randrange(LENGTH), seed), size)


@pytest.mark.parametrize("kind", ["leaves", "late"])
def test_without_our_launcher(kind):
    """Under a bare mpiexec rank 0 keeps the watch, and the rank that gives up says why."""
    fault = Fault(kind, victim=1, moment=20, seed=1)
    command = [str(part) for part in (sys.executable, SCRIPT, kind, fault.victim, fault.moment, fault.seed)]
    job = run(*command_line(Job(2, command), find()), timeout=60)
    operation = program(fault)[fault.moment]
    assert job.returncode != 0
    assert re.search(rf"(echelon|DistBackendError): {operation}.* \(number 21\) in the world .*rank 1", job.stderr), (
        job.stderr
    )


def test_no_false_alarm():
    """Long computations, waits that were given up, and ranks that end at different times."""
    job = echelon("run", "-n", 3, ROOT / "tests/comm/scripts/ends_early.py", timeout=60)
    assert (job.returncode, job.stdout.split()) == (0, ["NOT", "YET"]), job.stderr


def test_keeper_of_a_bare_job_dies():
    """Rank 0, which keeps the watch, is lost; MPI's own launcher or the watchdog must end the others."""
    command = [str(part) for part in (sys.executable, SCRIPT, "vanishes", 0, 20, 1)]
    job = run(*command_line(Job(2, command), find()), timeout=60)
    processes = [int(number) for number in re.findall(r"PROCESS (\d+)", job.stdout)]
    assert processes
    assert not any(map(alive, processes))
