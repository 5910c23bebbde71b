"""What a user gets from `pip install echelon`: built here, installed into an empty environment, and used from there."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT, SCRIPTS, environment

REQUIREMENTS = {"mpi4py", "numpy", "rich", "safetensors", "torch", "typer"}


def run(*command: object, folder: Path) -> str:
    clean = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    job = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=clean, cwd=folder, check=False
    )
    assert job.returncode == 0, f"{command}\n{job.stdout}\n{job.stderr}"
    return job.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    return folder


def test_wheel_and_sdist_hold_the_package(built):
    wheel, sdist = next(built.glob("*.whl")), next(built.glob("*.tar.gz"))
    names = run(sys.executable, "-m", "zipfile", "-l", wheel, folder=built)
    for name in ("echelon/comm/group.py", "echelon/cli.py", "entry_points.txt", "LICENSE"):
        assert name in names
    assert "tests/" not in names
    assert "pyproject.toml" in run(sys.executable, "-m", "tarfile", "-l", sdist, folder=built)


@pytest.mark.parametrize("kind", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.slow)], ids=["wheel", "sdist"])
def test_installed_into_an_empty_environment(built, kind, tmp_path):
    """A doctor who finds all well, and an unmodified script on two ranks."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python, package = home / "bin/python", next(built.glob(kind))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "-c", ROOT / "constraints.txt"]
    run(*pip, "torch", folder=tmp_path)
    run(*pip, f"{package}[mpich]", folder=tmp_path)
    code = (
        "import importlib.metadata as m; print(*[r.split(';')[0] for r in m.requires('echelon') if 'extra' not in r])"
    )
    requires = {requirement.split(">")[0] for requirement in run(python, "-c", code, folder=tmp_path).split()}
    assert requires == REQUIREMENTS
    assert "all is well" in run(home / "bin/echelon", "doctor", folder=tmp_path)
    output = run(home / "bin/echelon", "run", "-n", 2, SCRIPTS / "ddp.py", "echelon", folder=tmp_path)
    assert '"transport": "mpi"' in output
