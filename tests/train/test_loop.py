"""Training runs on real ranks: the same in every layout, and whether or not they were interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from echelon.parallel.data import full_parameters
from echelon.train.config import ConfigError, parse
from echelon.train.loop import Trainer
from tests.launch.jobs import echelon
from tests.train.runs import config, losses, rows, write

Sections = dict[str, dict[str, Any]]

LAYOUTS: dict[str, Sections] = {
    "dp 4": {},
    "dp 2 × tp 2": {"layout": {"tp": 2}},
    "dp 2 × cp 2": {"layout": {"cp": 2}},
    "stage 1": {"strategies": {"stage": 1, "precision": "fp64"}},
    "stage 2 in passes": {"strategies": {"stage": 2, "precision": "fp64"}, "train": {"micro_batch": 1}},
    "stage 3": {"strategies": {"stage": 3, "precision": "fp64"}},
    "hybrid × tp": {"layout": {"tp": 2, "replicate": 2}, "strategies": {"stage": 3, "precision": "fp64"}},
    "ulysses, recomputed": {
        "layout": {"cp": 2},
        "strategies": {"sequence": "ulysses", "recompute": "full", "chunk": 16, "precision": "fp64"},
    },
    "in passes": {"train": {"micro_batch": 1}},
}
PIPELINES: dict[str, Sections] = {
    "pp 4": {"layout": {"pp": 4}, "train": {"micro_batch": 2}},
    "pp 2 × dp 2": {"layout": {"pp": 2}},
    "zero-bubble × tp 2": {
        "layout": {"pp": 2, "tp": 2},
        "strategies": {"schedule": "zero-bubble", "precision": "fp64"},
    },
    "interleaved × stage 3": {
        "layout": {"pp": 2},
        "strategies": {"schedule": "interleaved", "chunks": 2, "stage": 3, "precision": "fp64"},
    },
    "gpipe × cp 2": {
        "layout": {"pp": 2, "cp": 2},
        "strategies": {"schedule": "gpipe", "balance": "time", "recompute": "full", "precision": "fp64"},
    },
    "chimera × dp 2": {
        "layout": {"pp": 2},
        "strategies": {"schedule": "chimera", "balance": [2, 2], "precision": "fp64"},
    },
    "gems": {"layout": {"pp": 4}, "strategies": {"schedule": "gems", "precision": "fp64"}},
}


_APART = {"model": {"tied": False}, "train": {"clip": 0.0, "micro_batch": 1}}
VERSIONED: dict[str, Sections] = {
    "pipedream": _APART | {"layout": {"pp": 2}, "strategies": {"schedule": "pipedream", "precision": "fp64"}},
    "pipedream-2bw": _APART | {"layout": {"pp": 4}, "strategies": {"schedule": "pipedream-2bw", "precision": "fp64"}},
}


def whole(sections: Sections, folder: str) -> list[Any]:
    """A run from the beginning to the end, or to the end from where it is; with this rank's parameters."""
    trainer = Trainer(config(**sections), folder)
    outcome = trainer.run()
    assert outcome.done
    parameters = {name: of.double().numpy() for name, of in full_parameters(trainer.model).items()}
    return [outcome.loss, outcome.held_out, parameters]


def a_part(sections: Sections, folder: str, steps: int) -> None:
    """Some steps of a run, with a checkpoint in the end, as if it had been asked to stop."""
    trainer = Trainer(config(**sections), folder)
    for _ in range(steps):
        trainer.take_step()
    trainer.save()
    trainer.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    job = echelon("train", write(folder / "config-of.toml"), "--run", folder / "run")
    assert job.returncode == 0, job.stdout + job.stderr
    return folder / "run"


@pytest.mark.parametrize("name", [*LAYOUTS, *PIPELINES])
def test_every_layout_is_the_same_run(ranks, tmp_path, alone, name):
    loss, held_out, _ = ranks(4, whole, (LAYOUTS | PIPELINES)[name], str(tmp_path))[0]
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-9)
    assert loss == losses(tmp_path)[-1]
    assert held_out == pytest.approx(rows(alone, "eval")[-1]["loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in LAYOUTS),
        *(("dp 2 × tp 2", "bf16"), ("stage 3", "bf16"), ("stage 3", "fp8")),
        *(
            ("pp 2 × dp 2", "fp16"),
            ("interleaved × stage 3", "bf16"),
            ("chimera × dp 2", "fp32"),
            ("pipedream", "fp32"),
        ),
    ],
)
def test_a_resumed_run_is_bitwise_the_same(ranks, tmp_path, name, precision):
    chosen = {"precision": "bf16", "fp8": True} if precision == "fp8" else {"precision": precision}
    sections = (LAYOUTS | PIPELINES | VERSIONED)[name]
    sections = sections | {"strategies": sections.get("strategies", {}) | chosen}
    undisturbed = ranks(4, whole, sections, str(tmp_path / "undisturbed"))
    ranks(4, a_part, sections, str(tmp_path / "resumed"), 3)
    resumed = ranks(4, whole, sections, str(tmp_path / "resumed"))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "undisturbed")
    for (*_, here), (*_, there) in zip(resumed, undisturbed, strict=True):
        assert all(np.array_equal(here[name], parameter) for name, parameter in there.items())
    assert rows(tmp_path / "resumed", "start")[-1]["step"] == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("dp 2 × tp 2", "stage 3"), ("stage 2 in passes", "dp 2 × cp 2"), ("hybrid × tp", "stage 1")),
        *(("pp 4", "interleaved × stage 3"), ("chimera × dp 2", "dp 2 × tp 2"), ("stage 1", "zero-bubble × tp 2")),
    ],
)
def test_from_layout_to_layout_and_back(ranks, tmp_path, alone, first, second):
    """Two steps each; optimizer state and data position come along."""
    known = LAYOUTS | PIPELINES
    ranks(4, a_part, known[first], str(tmp_path), 2)
    ranks(4, a_part, known[second], str(tmp_path), 2)
    ranks(4, whole, known[first], str(tmp_path))
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-9)


def test_on_fewer_ranks_and_back(ranks, tmp_path, alone):
    stage_3 = {"strategies": {"stage": 3, "precision": "fp64"}}
    ranks(4, a_part, stage_3, str(tmp_path), 2)
    ranks(2, a_part, {"layout": {"tp": 2}}, str(tmp_path), 2)
    ranks(4, whole, stage_3, str(tmp_path))
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-9)


def test_data_pipeline_and_tensor_parallelism_together(ranks, tmp_path, alone):
    layout = {"layout": {"dp": 2, "pp": 2, "tp": 2}, "train": {"micro_batch": 1}}
    ranks(8, whole, layout, str(tmp_path))
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-9)
    assert rows(tmp_path)[-1]["wire"].keys() == {"data", "pp", "tp", "world"}


@pytest.mark.parametrize("name", VERSIONED)
def test_one_update_a_step_is_synchronous(ranks, tmp_path, name):
    """Versions differ only from the second update on; across steps a pipeline is drained."""
    sections = VERSIONED[name] | {"train": {"clip": 0.0, "micro_batch": 4 if name == "pipedream" else 2}}
    ranks(4, whole, sections, str(tmp_path / "versions"))
    plain = sections | {"layout": {}, "strategies": {"precision": "fp64"}, "train": {"clip": 0.0}}
    ranks(2, whole, plain, str(tmp_path / "synchronous"))
    versions, synchronous = tmp_path / "versions", tmp_path / "synchronous"
    assert losses(versions) == pytest.approx(losses(synchronous), rel=1e-9)
    norms = [[row["norm"] for row in rows(folder)] for folder in (versions, synchronous)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


_SMALL = {"dim": 32, "layers": 2, "heads": 4, "mlp_dim": 64}
_TOKENS = _SMALL | {"vocabulary": 64, "context": 16}
MODELS: dict[str, Sections] = {
    "llama": {"model": _TOKENS | {"name": "llama2-7b", "kv_heads": 2}, "layout": {"tp": 2}},
    "bert": {"model": _TOKENS | {"name": "bert-base"}, "layout": {"tp": 2}},
    "vit": {"model": _SMALL | {"name": "vit-b16", "image": 32, "patch": 8, "classes": 8}, "layout": {"tp": 2}},
    "resnet": {
        "model": {"name": "resnet18", "classes": 8, "dims": [8, 8, 16, 16]},
        "strategies": {"stage": 3, "global_batchnorm": True},
        "data": {"image": 32},
    },
    "resnet in a pipeline": {
        "model": {"name": "resnet18", "classes": 8, "dims": [8, 8, 16, 16]},
        "layout": {"pp": 2},
        "strategies": {"schedule": "chimera", "global_batchnorm": True},
        "data": {"image": 32},
        "train": {"micro_batch": 2},
    },
}


def other_model(name: str, folder: str) -> None:
    train = {"steps": 4, "batch": 8, "log_every": 1, "device": "cpu"} | MODELS[name].get("train", {})
    tables = {"train": train, "optimizer": {"lr": 1e-2}}
    tables |= {"schedule": {"warmup": 0}, "model": MODELS[name]["model"]}
    tables |= {"data": MODELS[name].get("data", {}) | {"samples": 64, "held_out": 0.2}}
    tables |= {"layout": MODELS[name].get("layout", {}) if dist.get_world_size() > 2 else {}}
    tables |= {"strategies": MODELS[name].get("strategies", {}) | {"precision": "fp64"}}
    Trainer(parse(tables), folder).run()


@pytest.mark.parametrize("name", MODELS)
def test_other_models(ranks, tmp_path, name):
    """In a layout of four as on two ranks of dp."""
    ranks(4, other_model, name, str(tmp_path / "four"))
    ranks(2, other_model, name, str(tmp_path / "two"))
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "two"), rel=1e-9)


def test_local_sgd_and_fp16(ranks, tmp_path):
    """With plain SGD and an average after each step it is the synchronous run; fp16 finds its scale on the way."""
    plain = {"optimizer": {"kind": "sgd", "momentum": 0.0, "lr": 0.1}, "train": {"clip": 0.0}}
    local = plain | {"strategies": {"average_every": 1, "precision": "fp64"}}
    ranks(4, whole, plain, str(tmp_path / "synchronous"))
    ranks(4, whole, local, str(tmp_path / "local"))
    assert losses(tmp_path / "local") == pytest.approx(losses(tmp_path / "synchronous"), rel=1e-9)
    seldom = {"strategies": {"average_every": 4, "precision": "fp16"}, "train": {"steps": 30, "eval_every": 7}}
    ranks(4, whole, seldom, str(tmp_path / "fp16"))
    assert losses(tmp_path / "fp16")[-1] < losses(tmp_path / "fp16")[0]
    assert all(row["step"] < 20 for row in rows(tmp_path / "fp16", "skip"))


def test_a_resumed_evaluation_of_batch_norms_is_the_same(ranks, tmp_path):
    """Each rank has seen other images; what is evaluated and saved is the mean of all."""
    sections = {"model": MODELS["resnet"]["model"], "data": {"image": 32}, "strategies": {"precision": "fp64"}}
    ranks(2, images, sections, str(tmp_path / "undisturbed"), 6)
    ranks(2, images, sections, str(tmp_path / "resumed"), 3)
    ranks(2, images, sections, str(tmp_path / "resumed"), 6)
    undisturbed, resumed = (rows(tmp_path / name, "eval")[-1]["loss"] for name in ("undisturbed", "resumed"))
    assert resumed == pytest.approx(undisturbed, rel=1e-9)


def images(sections: Sections, folder: str, steps: int) -> None:
    """Some steps, as of a run of six."""
    tables = {"train": {"steps": 6, "batch": 8, "log_every": 1, "device": "cpu"}, "schedule": {"warmup": 0}}
    tables |= sections | {"data": sections["data"] | {"samples": 64, "held_out": 0.2}}
    trainer = Trainer(parse(tables), folder)
    while trainer.step < steps:
        trainer.take_step()
    trainer.evaluate()
    trainer.save()
    trainer.close()


def other_data(sections: Sections, folder: str) -> str:
    with pytest.raises(ConfigError) as error:
        Trainer(config(**sections), folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [("data", "samples", 41, "samples to train on was 40, and is now 41"), ("train", "seed", 1, "seed was 0, and is")],
)
def test_a_run_goes_on_with_its_own_data(ranks, tmp_path, section, name, value, words):
    ranks(2, a_part, {}, str(tmp_path), 2)
    assert all(words in told for told in ranks(2, other_data, {section: {name: value}}, str(tmp_path)))


def two_jobs(folder: str) -> str:
    trainer = Trainer(config(), folder)
    second = other_data({}, folder)
    trainer.close()
    Trainer(config(), folder).close()
    return second


def test_a_folder_is_for_one_job_at_a_time(ranks, tmp_path):
    assert all("is in use" in words for words in ranks(2, two_jobs, str(tmp_path)))
