"""Hugging Face Accelerate over Echelon, equal to the same over Gloo to the last bit.

Accelerate replaces a custom CPU backend by Gloo, except where `torch.distributed.is_mpi_available()`: there it asks
for `mpi`.
"""

from __future__ import annotations

import pytest

from tests.launch.jobs import SCRIPTS, echelon, result

pytest.importorskip("accelerate")


def test_accelerate_equals_gloo():
    ours, theirs = (
        result(echelon("run", "-n", 2, SCRIPTS / "accelerate_training.py", *backend)) for backend in ([], ["gloo"])
    )
    assert (ours.pop("backend"), theirs.pop("backend")) == ("echelon", "gloo")
    assert ours == theirs
    assert len(ours["losses"]) == 2
