"""Training on tiles of images: the same run in every layout, also taken up in another, from files read by tile."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from echelon.train.config import ConfigError, dump, parse
from echelon.train.data import large
from echelon.train.data.pathology import write_set
from echelon.train.loop import Trainer
from tests.launch.jobs import echelon
from tests.train.runs import losses, rows

RESNET = {"name": "resnet18", "classes": 2, "stem_dim": 4, "dims": [4, 8], "depths": [1, 1], "bottleneck": False}
UNET = {"name": "unet", "classes": 3, "dim": 2, "depth": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "SP": {"layout": {"sp": [2, 2]}},
    "SP × dp": {"layout": {"sp": 2, "dp": 2}},
    "SP+PP": {"layout": {"stages": [{"sp": 3}, {}]}},
    "SP+GEMS+PP": {"layout": {"stages": [{"sp": 3}, {}]}, "strategies": {"schedule": "gems-gpipe"}},
    "GEMS+LP × dp": {"layout": {"pp": 2, "dp": 2}, "strategies": {"schedule": "gems"}},
}
STEPS = 4


def tables(model: dict[str, Any], data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    found = {
        "model": model,
        "data": {"image": 40, "held_out": 0.25} | data,
        "train": {"steps": STEPS, "batch": 4, "micro_batch": 2, "eval_samples": 6, "clip": 1.0},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup": 1},
        "strategies": {"precision": "fp64", "global_batchnorm": True},
    }
    if sections.get("layout", {}).get("dp", 1) > 1:
        found["train"]["micro_batch"] = 1
    return found | {name: found.get(name, {}) | of for name, of in sections.items()}


def whole(given: dict[str, Any], folder: str) -> None:
    assert Trainer(parse(given), folder).run().done


def a_part(given: dict[str, Any], folder: str, steps: int) -> None:
    trainer = Trainer(parse(given), folder)
    for _ in range(steps):
        trainer.take_step()
    trainer.save()
    trainer.close()


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Images of 96 pixels, larger than what is trained on, of classes and with masks."""
    folders = {kind: tmp_path_factory.mktemp("sets") / kind for kind in ("classes", "masks")}
    for kind, folder in folders.items():
        write_set(folder, count=8, size=96, kind=kind)
    return folders


@pytest.fixture(scope="module")
def runs(sets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """What each kind of run is told, and how it goes in one process."""
    kinds = {
        "resnet": (RESNET, {"kind": "large-images", "path": str(sets["classes"])}),
        "unet": (UNET, {"kind": "large-images", "path": str(sets["masks"])}),
        "synthetic unet": (UNET, {"kind": "synthetic", "samples": 64, "held_out": 0.1}),
    }
    found = {}
    for name, (model, data) in kinds.items():
        folder = tmp_path_factory.mktemp("alone")
        (folder / "config.toml").write_text(dump(parse(tables(model, data))))
        job = echelon("train", folder / "config.toml", "--run", folder / "run")
        assert job.returncode == 0, job.stdout + job.stderr
        found[name] = (model, data), folder / "run"
    return found


def equal(folder: Path, alone: Path) -> None:
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-9)
    one, other = rows(alone, "eval")[-1], rows(folder, "eval")[-1]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
    assert other["accuracy"] == pytest.approx(one["accuracy"], rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["resnet", "unet"])
def test_every_layout_is_the_same_run(ranks: Any, runs: Any, tmp_path: Path, kind: str, layout: str) -> None:
    given, alone = runs[kind]
    ranks(4, whole, tables(*given, **LAYOUTS[layout]), str(tmp_path))
    equal(tmp_path, alone)


def opens(given: dict[str, Any], folder: str) -> int:
    """How many files a rank opens in a run."""
    opened, count = large.opened, 0

    def counted(path: Path) -> Any:
        nonlocal count
        count += 1
        return opened(path)

    large.opened = counted
    try:
        whole(given, folder)
    finally:
        large.opened = opened
    return count


def test_who_has_not_the_first_stage_reads_no_images(ranks: Any, runs: Any, tmp_path: Path) -> None:
    given, _ = runs["resnet"]
    *firsts, last = ranks(4, opens, tables(*given, **LAYOUTS["SP+PP"]), str(tmp_path))
    assert min(firsts) >= STEPS * 4
    assert last == 0


def test_without_files(ranks: Any, runs: Any, tmp_path: Path) -> None:
    given, alone = runs["synthetic unet"]
    ranks(4, whole, tables(*given, **LAYOUTS["SP"]), str(tmp_path))
    equal(tmp_path, alone)


def test_from_layout_to_layout(ranks: Any, runs: Any, tmp_path: Path) -> None:
    """Also where ranks hold different stages."""
    given, alone = runs["resnet"]
    both_ways = tables(*given, **LAYOUTS["SP+GEMS+PP"])
    ranks(4, a_part, both_ways, str(tmp_path), 1)
    ranks(4, a_part, tables(*given, **LAYOUTS["SP"]), str(tmp_path), 1)
    ranks(4, a_part, tables(*given, **LAYOUTS["SP × dp"]), str(tmp_path), 1)
    ranks(4, whole, both_ways, str(tmp_path))
    equal(tmp_path, alone)


@pytest.mark.parametrize("layout", ["SP", "SP+GEMS+PP"])
def test_what_was_predicted_is_held(ranks: Any, runs: Any, tmp_path: Path, layout: str) -> None:
    """Memory, in fp32, which is planned; of a process's peak, activations are a part."""
    (model, data), _ = runs["resnet"]
    how = LAYOUTS[layout]
    strategies = {"precision": "fp32", **how.get("strategies", {})}
    ranks(4, whole, tables(model, data, record={"first": 1}, **(how | {"strategies": strategies})), str(tmp_path))
    held = json.loads((tmp_path / "memory.json").read_text())
    for figures in held.values():
        for kind in ("parameters", "gradients", "optimizer"):
            assert figures["measured"][kind] == pytest.approx(figures["predicted"][kind], rel=0.02)
        assert figures["measured"]["rest"] > figures["predicted"]["rest"] > 0


def test_a_layout_of_stages_is_written_and_read() -> None:
    config = parse({"model": RESNET, "layout": {"stages": [{"sp": [2, 2]}, {"sp": 2}, {}], "dp": 2}})
    assert "stages = [{sp = [2, 2]}, {sp = 2}, {}]" in dump(config)
    assert parse(tomllib.loads(dump(config))) == config


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"stages": [4, 1]}, r"stages = \[4, 1\] is not a list of tables, one for each stage: \[\{sp = 4\}, \{\}\]"),
        ({"stages": [{"so": 4}]}, "a stage has no 'so'.*: cp, sp, tp"),
        ({"sp": [2, 2, 2]}, "sp = .* is not a list of 2 numbers"),
        ({"stages": [{"sp": 0}]}, "sp counts ranks, so it is 1 or more"),
    ],
)
def test_what_a_layout_cannot_say(layout: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse({"model": RESNET, "layout": layout})
