"""Running whole jobs from tests, and reading what they printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sysconfig.get_path("scripts"))
_LAUNCHER_VARIABLES = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_\w+|OMPI_COMM_\w+|PMI_\w+|MPI_LOCAL\w+)$"
)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, without what a launcher may have put there."""
    clean = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.match(name)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | extra


def run(*command: object, timeout: float = 90, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**extra),
        check=False,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


def echelon(*arguments: object, timeout: float = 90, **extra: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "echelon.cli", *arguments, timeout=timeout, **extra)


def result(job: subprocess.CompletedProcess[str]) -> Any:
    """What a script printed after RESULT."""
    assert job.returncode == 0, f"exit code {job.returncode}\n{job.stdout}\n{job.stderr}"
    lines = [line.split("RESULT ", 1)[1] for line in job.stdout.splitlines() if "RESULT " in line]
    assert len(lines) == 1, f"not one result but {len(lines)}:\n{job.stdout}\n{job.stderr}"
    return json.loads(lines[0]) if lines[0].startswith("{") else lines[0]
