"""Export to Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echelon.models import hub
from echelon.parallel import data
from echelon.train.checkpoint import CheckpointError
from echelon.train.config import Config, dump
from echelon.train.export import export
from tests.parallel.matrix import LENGTH, VOCABULARY, row
from tests.train.checkpoints import Training

LAYOUT = row("shard 3 × tp", 3, dp=2, tp=2)
MODEL = {"name": "gpt2", "vocabulary": VOCABULARY, "context": LENGTH, "dim": 32, "layers": 2, "heads": 4}


def trained(run: Path) -> dict[str, np.ndarray]:
    """A run of two steps, each saved; returns the parameters after the first."""
    training = Training("gpt", LAYOUT, run / "checkpoints")
    training.step(0)
    training.checkpoints.save(1, {})
    first = {name: parameter.numpy() for name, parameter in data.full_parameters(training.model).items()}
    training.step(1)
    training.checkpoints.save(2, {})
    training.checkpoints.close()
    return first


def test_export(ranks, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump(Config(model=MODEL, strategies=LAYOUT.strategies)))
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        export(run, tmp_path / "out")
    expected = ranks(4, trained, run)[0]
    assert export(run, tmp_path / "out", 1) == 1
    found = {name: parameter.detach().numpy() for name, parameter in hub.load(tmp_path / "out").named_parameters()}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], value) for name, value in expected.items())
    assert export(run, tmp_path / "out") == 2
    newer = hub.load(tmp_path / "out").get_parameter("tokens.weight").detach().numpy()
    assert not np.array_equal(newer, expected["tokens.weight"])


def test_of_another_model(ranks, tmp_path):
    ranks(4, trained, tmp_path)
    (tmp_path / "config.toml").write_text(dump(Config(model=MODEL | {"layers": 3}, strategies=LAYOUT.strategies)))
    with pytest.raises(CheckpointError, match=r"it has no model\.blocks\.2"):
        export(tmp_path, tmp_path / "out")
