"""Configs: read, overridden, written out, and refused with the nearest thing that would do."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from echelon import models
from echelon.models import hub
from echelon.train.checks import check, check_files, micro_batch, passes
from echelon.train.config import ConfigError, dump, load, parse
from tests.train.runs import TINY, config, tables, write

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_is_shipped_is_valid_and_written_out_whole(path):
    found = load(path)
    assert parse(tomllib.loads(dump(found))) == found
    check(load(path, ["data.kind=synthetic"]), 8)


def test_overrides(tmp_path):
    path = write(tmp_path / "a.toml")
    found = load(
        path, ["train.steps=7", "layout.tp=2", "optimizer.betas=[0.8, 0.9]", "data.path=some file", "model.dim=64"]
    )
    assert (found.train.steps, found.layout.tp, found.optimizer.betas) == (7, 2, (0.8, 0.9))
    assert (found.data.path, found.architecture.dim) == ("some file", 64)
    assert found.layout.dp == -1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trian": {}}, "no section [trian] (did you mean 'train'?)"),
        ({"routes": {"tpp": "mpi"}}, "no setting 'tpp' (did you mean 'tp'?)"),
        ({"routes": {"tp": "mpi+fast"}}, "[routes]: there is no road 'mpi+fast'"),
        ({"routes": {"data": "broadcast=mpi+ring"}}, "[routes]: mpi+ring has no broadcast"),
        ({"train": {"stpes": 1}}, "no setting 'stpes' (did you mean 'steps'?)"),
        ({"train": {"steps": "many"}}, 'steps = "many" is not a whole number'),
        ({"train": {"steps": True}}, "steps = true is not a whole number"),
        ({"train": {"clip": "x"}}, "is not a number"),
        ({"optimizer": {"kind": "adam"}}, "none of adamw, sgd (did you mean 'adamw'?)"),
        ({"optimizer": {"betas": 0.9}}, "is not a list of 2 numbers"),
        ({"strategies": {"stage": 4}}, "stage = 4 is none of 0, 1, 2, 3"),
        ({"strategies": {"precision": "bf61"}}, "did you mean 'bf16'?"),
        ({"model": {"name": "gtp2"}}, "no model is named 'gtp2' (did you mean 'gpt2'?)"),
        ({"model": {"layrs": 2}}, "no field 'layrs' (did you mean 'layers'?)"),
        ({"model": {"layers": "two"}}, "is not a whole number"),
        ({"model": {"init": "/no/such/folder"}}, "/no/such/folder"),
        ({"model": {"name": "gpt2", "init": "x"}}, "leave one out"),
        ({"layout": {"tp": 0}}, "tp counts ranks"),
        ({"layout": {"pt": 2}}, "no setting 'pt'"),
        ({"train": 3}, "train is a section"),
        ({"model": {"name": 5}}, "name = 5 is not a text"),
        ({"model": {"heads": 0}}, "heads = 0: it is 1 or more"),
        ({"model": {"context": -4}}, "context = -4: it is 1 or more"),
        ({"optimizer": {"betas": [0.9]}}, "is not a list of 2 numbers"),
        ({"strategies": {"schedule": "1f2b"}}, "schedule='1f2b' is none of gpipe, 1f1b, interleaved"),
        ({"strategies": {"balance": "weight"}}, 'balance = "weight" is none of memory, time'),
        ({"strategies": {"balance": [1, 2.5]}}, "balance = [1, 2.5] is not a list of whole numbers"),
    ],
)
def test_errors_name_what_would_do(given, words):
    with pytest.raises(ConfigError) as error:
        parse(given)
    assert words in str(error.value)


def test_an_override_of_what_is_no_section(tmp_path):
    (tmp_path / "a.toml").write_text("train = 5\n")
    with pytest.raises(ConfigError, match="train is a section"):
        load(tmp_path / "a.toml", ["train.steps=3"])


@pytest.mark.parametrize("override", ["train.steps", "steps=3", "=3"])
def test_an_override_has_a_form(tmp_path, override):
    with pytest.raises(ConfigError, match=r"section\.name=value"):
        load(write(tmp_path / "a.toml"), [override])


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path / "gpt-small.toml")
    with pytest.raises(ConfigError, match=r"No such file.*did you mean.*gpt-small\.toml"):
        load(tmp_path / "gpt-smal.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("given", "ranks", "words"),
    [
        ({"train": {"batch": 6}}, 4, "the nearest that can are 4 and 8"),
        ({"train": {"batch": 2}}, 4, "the least that can is 4"),
        ({"train": {"micro_batch": 3}}, 2, "the nearest that does is 4"),
        ({"layout": {"tp": 3}}, 3, "tp=3 cannot split 4 heads"),
        ({"layout": {"dp": 2, "tp": 2}}, 8, "Layout(dp=2, tp=2) needs 4 ranks, but 8 are running"),
        ({"layout": {"sp": 2}}, 2, "no images that sp could cut: use cp"),
        ({"layout": {"pp": 8}}, 8, "cannot be cut into 8 stages: use 1 to 4, or a deeper model"),
        ({"layout": {"pp": 2}, "strategies": {"balance": [1, 2]}}, 2, "it says how many links each stage gets"),
        ({"layout": {"pp": 3}, "strategies": {"schedule": "chimera"}}, 3, "choose 2 or 4, or a schedule of one"),
        (
            {"layout": {"pp": 4}, "strategies": {"schedule": "pipedream-2bw"}, "model": {"tied": False}}
            | {"train": {"micro_batch": 4, "clip": 0.0}},
            4,
            "needs a multiple of 4 microbatches, for weights are updated after each so many, but has 2: choose 4 (a "
            "step's 8 samples for each rank of dp, [train] batch = 8 over dp = 1, are 2 microbatches of [train] "
            "micro_batch = 4)",
        ),
        ({"layout": {"pp": 2}, "strategies": {"chunks": 2}}, 2, "leave chunks out, or choose interleaved"),
        ({"layout": {"pp": 2}, "strategies": {"schedule": "interleaved"}}, 2, "choose chunks=2 or more, or 1f1b"),
        ({"layout": {"pp": 2}, "strategies": {"schedule": "pipedream"}}, 2, "use tied = false, or a synchronous"),
        (
            {"layout": {"pp": 2}, "strategies": {"schedule": "pipedream"}, "model": {"tied": False}},
            2,
            "clip = 1.0: pipedream updates each stage by itself, and never knows the norm of all gradients: use clip",
        ),
        ({"layout": {"pp": 2}, "strategies": {"schedule": "zero-bubble", "compile": True}}, 2, "use compile=False"),
        ({"layout": {"pp": 2, "tp": 2}, "strategies": {"schedule": "gems"}}, 4, "gems goes with dp alone"),
        ({"layout": {"pp": 2}, "strategies": {"average_every": 2}}, 2, "use average_every=0, or pp=1"),
        ({"data": {"length": 32}}, 1, "use 16 or less"),
        ({"data": {"length": 15}, "layout": {"tp": 2}}, 2, "the nearest that can are 14 and 16"),
        ({"data": {"length": 14}, "layout": {"cp": 2}}, 2, "a multiple of 4"),
        ({"layout": {"cp": 8}, "strategies": {"sequence": "ulysses"}}, 8, "does not divide them"),
        ({"data": {"kind": "images"}}, 1, "takes tokens: choose text or tokens or datasets or synthetic"),
        ({"data": {"kind": "text"}}, 1, "needs a path"),
        ({"data": {"samples": 0}}, 1, "samples = 0: it is a number, 1 or more"),
        ({"train": {"steps": 0}}, 1, "steps = 0: it is a number, 1 or more"),
        ({"train": {"eval_samples": -5}}, 1, "it is a number, 0 or more"),
        ({"train": {"seed": 10**23}}, 1, "it is a number, 0 or more"),
        ({"optimizer": {"lr": float("nan")}}, 1, "lr = nan: it is a number"),
        ({"optimizer": {"betas": [0.9, 1.5]}}, 1, "each is 0 or more, and below 1"),
        ({"data": {"kind": "text", "path": "a", "held_out_path": "a"}}, 1, "trained on and held out at once"),
        ({"data": {"held_out_split": "test"}}, 1, 'held_out_split is for kind = "datasets"'),
        ({"data": {"held_out": 2}}, 1, "is a share, from 0 to 1"),
    ],
)
def test_impossible_together(given, ranks, words):
    with pytest.raises(ConfigError) as error:
        check(config(**given), ranks)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("given", "ranks", "count"),
    [
        ({}, 2, 1),
        ({"layout": {"pp": 2}}, 2, 8),
        ({"layout": {"pp": 4}}, 4, 8),  # as many as there are samples, where there are less than four a stage
        ({"layout": {"pp": 2}, "train": {"batch": 12}}, 2, 12),
        ({"layout": {"pp": 2}, "train": {"batch": 64}}, 4, 8),
        ({"layout": {"pp": 2}, "train": {"batch": 64, "micro_batch": 8}}, 4, 4),
    ],
)
def test_passes_of_a_step(given, ranks, count):
    found = check(config(**given), ranks)
    assert passes(found) == count
    assert passes(found) * micro_batch(found) * found.layout.dp == found.train.batch


def test_data_that_is_not_there():
    with pytest.raises(ConfigError, match="there is no such file"):
        check_files(config(data={"kind": "tokens", "path": "no-such.bin"}))


def test_images_and_tokens_are_not_taken_for_each_other():
    with pytest.raises(ConfigError, match="takes images: choose images or large-images or synthetic"):
        check(parse({"model": {"name": "resnet18"}, "data": {"kind": "text", "path": "python"}}), 1)
    with pytest.raises(ConfigError, match="UNet, which takes images: choose large-images or synthetic"):
        check(parse({"model": {"name": "unet"}, "data": {"kind": "images", "path": "."}}), 1)
    with pytest.raises(ConfigError, match="takes images of 224: set"):
        check(parse({"model": {"name": "vit-b16"}, "data": {"image": 32}}), 1)
    with pytest.raises(ConfigError, match="no `blocks`"):
        check(parse({"model": {"name": "resnet18"}, "layout": {"tp": 2}}), 2)


def test_starting_from_a_folder(tmp_path):
    model = models.build("gpt2", **{name: of for name, of in TINY["model"].items() if name != "name"})
    hub.save(model, tmp_path / "hf")
    path = write(tmp_path / "a.toml")
    found = load(path, ["model.dropout=0.0"], init=tmp_path / "hf")
    assert found.architecture.dim == TINY["model"]["dim"]
    assert found.architecture.dropout == 0
    assert parse(tables()).architecture.dropout == TINY["model"]["dropout"]
