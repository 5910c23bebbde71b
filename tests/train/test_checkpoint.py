"""Checkpoints on real ranks: any layout to any other, and what goes wrong."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.parallel import data
from echelon.train.checkpoint import CheckpointError, _reason, complete, difference
from tests.launch.jobs import echelon
from tests.parallel.matrix import Row, row
from tests.train.checkpoints import LEG, Training, alone, leg

SCRIPTS = Path(__file__).parent / "scripts"
REPLICATE, SHARD_3 = row("replicate", dp=4), row("shard 3", 3, dp=4)
SHARD_2_OF_TWO, TP_OF_TWO = row("shard 2 of two", 2, dp=2), row("tp of two", tp=2)
RECOMPUTED = replace(SHARD_3, name="recomputed", strategies=replace(SHARD_3.strategies, recompute="full"))
PATHS = [
    ("gpt", REPLICATE, SHARD_3, "adamw"),
    ("gpt", row("shard 1", 1, dp=4), row("dp × tp", dp=2, tp=2), "adamw"),
    ("gpt", row("shard 2 × tp", 2, dp=2, tp=2), row("hybrid", 3, dp=4, replicate=2), "sgd"),
    ("gpt", row("shard 2", 2, dp=4), TP_OF_TWO, "adamw"),
    ("gpt", RECOMPUTED, row("shard 1 × ulysses", 1, dp=2, cp=2, sequence="ulysses"), "adamw"),
    ("llama", row("fewer kv heads than tp", 1, tp=4), row("shard 1 × tp", 1, dp=2, tp=2), "adamw"),
    ("llama", row("ring", dp=2, cp=2), row("shard 3 × tp", 3, dp=2, tp=2), "adamw"),
    ("vit", row("shard 1 × tp", 1, dp=2, tp=2), TP_OF_TWO, "adamw"),
    ("resnet", REPLICATE, row("shard 3 of two", 3, dp=2), "sgd"),
]


def name(value: object) -> str:
    return value.name if isinstance(value, Row) else str(value)


@pytest.mark.parametrize(("family", "one", "other", "optimizer"), PATHS, ids=name)
def test_any_layout_to_any_other(ranks, tmp_path, family, one, other, optimizer):
    """There and back, with the losses of one process that is not disturbed."""
    losses = []
    for number, layout in enumerate((one, other, one)):
        losses += ranks(layout.layout.size, leg, family, layout, tmp_path, number * LEG, optimizer)[0]
    assert losses == pytest.approx(alone(family, optimizer), rel=1e-9)


def test_state_in_the_hosts_memory_or_not(ranks, tmp_path):
    losses = []
    for number, on_cpu in enumerate((True, False, True)):
        losses += ranks(2, leg, "gpt", SHARD_2_OF_TWO, tmp_path, number * LEG, "adamw", on_cpu)[0]
    assert losses == pytest.approx(alone("gpt"), rel=1e-9)


def resumed(layout: Row, folder: Path) -> None:
    """A second run from the first's checkpoint equals the first, which trained on while it was saved."""
    first = Training("gpt", layout, folder)
    for number in range(LEG):
        first.step(number)
    first.checkpoints.save(LEG, {})
    expected = [first.step(number) for number in range(LEG, 2 * LEG)]
    first.checkpoints.close()
    second = Training("gpt", layout, folder)
    assert second.checkpoints.load() == {"step": LEG}
    assert [second.step(number) for number in range(LEG, 2 * LEG)] == expected
    assert second.optimizer.loss_scale == first.optimizer.loss_scale
    ours, theirs = data.full_parameters(second.model), data.full_parameters(first.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    second.checkpoints.close()


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("bf16", 1), ("fp16", 2), ("bf16", 3), ("fp64", 3)])
def test_same_layout_is_the_same_to_the_bit(ranks, tmp_path, precision, stage):
    layout = row("", stage, dp=2)
    ranks(2, resumed, replace(layout, strategies=replace(layout.strategies, precision=precision)), tmp_path)


def after_an_evaluation(folder: Path) -> None:
    """FSDP2 has kept whole parameters, which are neither what is saved nor what is loaded into."""
    training = Training("gpt", row("", 3, dp=2), folder)
    training.step(0)
    tokens = torch.zeros(1, 4, dtype=torch.int64)

    def evaluate() -> torch.Tensor:
        training.model.eval()
        with torch.no_grad():
            logits: torch.Tensor = training.model(tokens_BS=tokens)
        training.model.train()
        return logits

    expected = evaluate()
    training.checkpoints.save(1, {})
    training.step(1)
    assert not torch.equal(evaluate(), expected)
    training.checkpoints.load()
    assert torch.equal(evaluate(), expected)
    training.checkpoints.close()


def test_after_an_evaluation(ranks, tmp_path):
    ranks(2, after_an_evaluation, tmp_path)


def statistics(folder: Path) -> None:
    """Where ranks' statistics differ, those of the first are saved."""
    layout = row("", dp=2)
    layout = replace(layout, strategies=replace(layout.strategies, global_batchnorm=False))
    training = Training("resnet", layout, folder)
    training.step(0)
    first = torch.cat([buffer.double().flatten() for buffer in training.model.buffers()])
    assert first.any()
    dist.broadcast(first, 0)
    training.checkpoints.save(1, {})
    training.step(1)
    training.checkpoints.load()
    assert torch.equal(torch.cat([buffer.double().flatten() for buffer in training.model.buffers()]), first)
    training.checkpoints.close()


def test_statistics_of_the_first_rank(ranks, tmp_path):
    ranks(2, statistics, tmp_path)


def several(folder: Path) -> list[int]:
    training = Training("gpt", SHARD_2_OF_TWO, folder, keep=2)
    for number in range(1, 4):
        training.checkpoints.save(number, {"try": 1})
    training.checkpoints.save(3, {"try": 2})
    training.checkpoints.close()
    again = Training("gpt", SHARD_2_OF_TWO, folder)
    assert again.checkpoints.load() == {"step": 3, "try": 2}
    with pytest.raises(CheckpointError, match=r"there is no .*step-00000001; the steps saved are 2, 3"):
        again.checkpoints.load(1)
    again.checkpoints.save(1, {"try": 3})
    again.checkpoints.close()
    return complete(folder)


def test_keep(ranks, tmp_path):
    """The newest, but always the one just saved; and each step once."""
    assert ranks(2, several, tmp_path) == [[1, 3]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("moment", ["while it writes", "before it is renamed"])
def test_killed_in_a_save(ranks, tmp_path, moment):
    """The checkpoint before is whole, and training goes on from it as if nothing had been."""
    job = echelon("run", "-n", 2, SCRIPTS / "dies_in_save.py", tmp_path, moment)
    assert job.returncode != 0
    assert "RESULT" not in job.stdout
    assert complete(tmp_path) == [LEG]
    assert (tmp_path / f"step-{LEG + 1:08}.saving").is_dir()
    losses = ranks(2, leg, "gpt", SHARD_2_OF_TWO, tmp_path, LEG)[0]
    assert losses == pytest.approx(alone("gpt")[LEG : 2 * LEG], rel=1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{LEG:08}", f"step-{2 * LEG:08}"]


def test_killed_while_one_takes_anothers_place(ranks, tmp_path):
    ranks(2, leg, "gpt", SHARD_2_OF_TWO, tmp_path, 0)
    (tmp_path / f"step-{LEG:08}").rename(tmp_path / f"step-{LEG:08}.old")
    ranks(2, leg, "gpt", SHARD_2_OF_TWO, tmp_path, LEG)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    """Checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("saved")
    for first in (0, LEG):
        ranks(2, leg, "gpt", SHARD_2_OF_TWO, folder, first)
    return folder


def refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    """The error is the same on all ranks, and the model as it was."""
    optimizer = changes.pop("optimizer", "adamw")
    layout = replace(SHARD_2_OF_TWO, strategies=replace(SHARD_2_OF_TWO.strategies, **changes.pop("strategies", {})))
    training = Training(changes.pop("family", "gpt"), layout, folder, optimizer, about=changes)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        training.checkpoints.load()
    training.checkpoints.close()
    assert all(map(torch.equal, training.model.parameters(), before))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


NEWEST = f"step-{2 * LEG:08}"
OTHER = rf"Step {LEG} is complete: remove .*{NEWEST} to continue from there"
DAMAGES = {
    "truncated": (lambda path: cut(path / "__1_0.distcp"), rf"__1_0.distcp is truncated: it has \d+ bytes .*{OTHER}"),
    "missing": (lambda path: (path / "__0_0.distcp").unlink(), rf"__0_0.distcp is missing .*{OTHER}"),
    "metadata": (lambda path: cut(path / ".metadata"), rf"\.metadata cannot be read .*{OTHER}"),
    "foreign": (lambda path: (path / "state.json").unlink(), rf"no checkpoint of Echelon's.*{OTHER}"),
    "other format": (lambda path: (path / "state.json").write_text('{"step": 1}'), "no checkpoint of Echelon's"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged(ranks, saved, tmp_path, damage, message):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / NEWEST)
    ranks(2, refused, tmp_path, {}, message)


OTHERS = {
    "model": ({"model": {"name": "gpt", "layers": 3}}, r"its model\.layers is not set, here it is 3\. Set it"),
    "precision": ({"strategies": {"precision": "fp32"}}, r"its precision is fp64, here it is fp32"),
    "optimizer": ({"optimizer": "sgd"}, r"its optimizer is AdamW, here it is SGD"),
    "tensors": (
        {"family": "llama", "model": {"name": "gpt"}},
        r"its model\.\S+ is torch.float64 .*, here it is",
    ),
}


@pytest.mark.parametrize(("changes", "message"), OTHERS.values(), ids=OTHERS)
def test_of_another_run(ranks, saved, changes, message):
    ranks(2, refused, saved, changes, message)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Room for one checkpoint and a half."""
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1300k", "none", tmp_path], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("only root can mount a small disk")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def full(folder: Path) -> None:
    training = Training("gpt", SHARD_2_OF_TWO, folder)
    training.step(0)
    training.checkpoints.save(1, {})
    training.checkpoints.wait()
    training.step(1)
    training.checkpoints.save(2, {})
    with pytest.raises(
        CheckpointError, match=rf"step 2 could not be saved in {folder}, where \d+ bytes .*step 1"
    ) as told:
        training.checkpoints.wait()
    assert "No space left on device" in str(told.value), str(told.value)
    assert complete(folder) == [1]
    assert training.checkpoints.load() == {"step": 1}
    training.checkpoints.close()


class AlmostFull(io.RawIOBase):
    """Has room for the first bytes; PyTorch then meets the error while it ends the file, and says something else."""

    room = 200

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


def test_pytorchs_words_for_a_full_disk_are_explained():
    with pytest.raises(RuntimeError) as theirs:
        torch.save(torch.zeros(1000), AlmostFull())
    assert "No space left on device" in _reason(theirs.value)


def test_full_disk(ranks, small_disk):
    """All ranks are told, the checkpoint before is whole, and nothing is left of the one that failed."""
    ranks(2, full, small_disk)
    assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]


def unusable(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{folder} cannot hold checkpoints: Not a directory|File exists"):
        Training("gpt", SHARD_2_OF_TWO, folder)
    with pytest.raises(ValueError, match="keep=0"):
        Training("gpt", SHARD_2_OF_TWO, folder, keep=0)


def test_a_file_where_the_folder_should_be(ranks, tmp_path):
    (tmp_path / "file").touch()
    ranks(2, unusable, tmp_path / "file")


def test_difference():
    assert difference({"model": {"layers": 2}}, {"model": {"layers": 2}}) is None
    assert difference({"model": {"layers": 2}}, {"model": {"layers": 3}}) == "its model.layers is 2, here it is 3"
    assert difference({"a": 1}, {"a": 1, "b": 2}) == "its b is not set, here it is 2"
