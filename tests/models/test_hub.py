"""Folders that can be loaded and saved, and those that cannot: each with an error that says what to do."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from echelon import models
from echelon.models import files, hub
from echelon.models.gpt import GPTConfig
from echelon.models.llama import LlamaConfig
from tests.models.references import CASES, inputs, logits, reference

GPT = GPTConfig(vocabulary=60, context=16, dim=16, layers=2, heads=2)
LLAMA = LlamaConfig(vocabulary=60, dim=16, layers=2, heads=4, kv_heads=2, mlp_dim=24)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    hub.save(models.build(GPT), tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def change_tensors(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_round_trips_are_exact(case, tmp_path):
    reference(case).save_pretrained(tmp_path / "theirs")
    first = hub.load(tmp_path / "theirs")
    hub.save(first, tmp_path / "ours", max_shard_bytes=10_000)
    second = hub.load(tmp_path / "ours")
    assert [*first.state_dict()] == [*second.state_dict()]
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept(dtype, tmp_path):
    hub.save(models.build(LLAMA).to(dtype), tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert {parameter.dtype for parameter in hub.load(tmp_path / "model").parameters()} == {dtype}
    assert hub.load(tmp_path / "model", dtype=torch.float32).norm.weight.dtype == torch.float32


def test_overrides_change_the_config(folder):
    assert hub.load(folder, dropout=0.3).blocks[0].mlp_dropout.p == 0.3
    with pytest.raises(ValueError, match="no field 'droput'"):
        hub.load(folder, droput=0.3)


def test_shards_hold_no_more_than_asked(tmp_path):
    model = models.build(LLAMA)
    hub.save(model, tmp_path / "model", max_shard_bytes=5_000)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    assert len(shards) > 2
    for shard in shards:
        assert sum(tensor.nbytes for tensor in load_file(shard).values()) <= 5_000
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())


def test_old_names(folder):
    """As in the files of the first GPT-2 and BERT: no prefix, masks as tensors, norms named otherwise; a head twice."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            old = name.removeprefix("transformer.")
            if ".ln_1." in old:
                old = old.replace(".weight", ".gamma").replace(".bias", ".beta")
            tensors[old] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    expected = hub.load(folder).state_dict()
    change_tensors(folder, change)
    for name, value in hub.load(folder).state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("family", [GPT, LLAMA], ids=["tied", "not tied"])
def test_the_links_of_a_stage_alone(family, rank, tmp_path):
    """From a folder and by seed: also of a parameter that another stage has by its other name."""
    whole = models.build(family)
    hub.save(whole, tmp_path / "model")
    count = len(whole.links())
    with torch.device("meta"):
        part = models.build(family)
    part.keep([[range(2)], [range(2, count)]], rank)
    part.to_empty(device="cpu")
    expected = {name: tensor for name, tensor in whole.state_dict(keep_vars=True).items() if name in part.state_dict()}
    for fill in (partial(hub.load_into, part, tmp_path / "model"), part.initialize):
        for tensor in part.parameters():
            tensor.data.fill_(float("nan"))
        fill()
        assert part.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in part.state_dict().items())


def test_missing_tensors(folder):
    change_tensors(folder, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.bias"))
    with pytest.raises(
        ValueError, match=r"model cannot be loaded: it lacks transformer.h.1.mlp.c_fc.bias: is it whole"
    ):
        hub.load(folder)


def test_unexpected_tensors(folder):
    change_config(folder, n_layer=1)
    with pytest.raises(ValueError, match=r"holds transformer.h.1.attn.c_attn.bias, .* and 7 more, .* no place"):
        hub.load(folder)


def test_wrong_shapes(folder):
    model = models.build(GPT, vocabulary=61)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"other shapes .* transformer.wte.weight \(60, 16\) instead of \(61, 16\)"):
        hub.load_into(model, folder)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_another_family(folder):
    with pytest.raises(ValueError, match="holds a GPT2LMHeadModel, which cannot be loaded into a Llama"):
        hub.load_into(models.build(LLAMA), folder)
    with pytest.raises(ValueError, match="Linear is not one of the models"):
        hub.load_into(nn.Linear(2, 2), folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, r"model_type 'lama' .did you mean 'llama'\?., but what can be loaded is gpt2, llama"),
        ({"model_type": None}, "model_type None"),
        ({"quantization_config": {"bits": 4}}, "quantized .* load the original"),
        ({"activation_function": "relu"}, "activation_function = 'relu', but only 'gelu_new' is supported"),
        ({"model_type": "llama"}, "config.json has no hidden_size, num_hidden_layers, num_attention_heads"),
    ],
)
def test_configs_that_cannot_be_computed(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        hub.load(folder)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_other_scalings_of_rope(key, tmp_path):
    hub.save(models.build(LLAMA), tmp_path / "model")
    change_config(tmp_path / "model", **{key: {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(ValueError, match="by 'yarn'; only 'llama3' is supported"):
        hub.load(tmp_path / "model")


class Trap:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.trace,)


def test_pickles_are_never_opened(folder, tmp_path):
    trace = tmp_path / "trace"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(trace)))
    hub.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"only as pickles .pytorch_model.bin.*never opened: take the safetensors"):
        hub.load(folder)
    assert not trace.exists()


def test_broken_folders(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json: give the folder"):
        hub.load(tmp_path / "nothing")
    (folder / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=r"its file model.safetensors cannot be read .*download it again"):
        hub.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        hub.load(folder)


def test_a_lost_shard(tmp_path):
    hub.save(models.build(GPT), tmp_path / "model", max_shard_bytes=5_000)
    lost = min((tmp_path / "model").glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(ValueError, match=f"names {lost.name}, which are not there"):
        hub.load(tmp_path / "model")


def test_saving_replaces_a_checkpoint_and_keeps_its_tokenizer(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    hub.save(models.build(LLAMA), folder, max_shard_bytes=5_000)
    assert isinstance(hub.load(folder).config, LlamaConfig)
    assert not (folder / "model.safetensors").exists()
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_overwrites_nothing_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(ValueError, match="is not a checkpoint, so it is not overwritten"):
        hub.save(models.build(GPT), tmp_path)
    with pytest.raises(ValueError, match="is not a checkpoint, so it is not overwritten"):
        hub.save(models.build(GPT), tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "chapter 1"


def test_a_save_that_fails_leaves_what_was_there(folder, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    saved = []

    def fail_at_the_second(tensors: object, path: Path, **more: object) -> None:
        saved.append(path)
        if len(saved) == 2:
            raise OSError("no space left on device")
        save_file(tensors, path, **more)

    monkeypatch.setattr(files, "save_file", fail_at_the_second)
    with pytest.raises(OSError, match="no space left"):
        hub.save(models.build(LLAMA), folder, max_shard_bytes=5_000)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_shapes_that_transformers_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="no model of Hugging Face's has qk_norm=True together with qkv_bias=True"):
        hub.save(models.build(LLAMA, qk_norm=True, qkv_bias=True), tmp_path / "model")


def test_a_saved_model_computes_the_same(tmp_path):
    model = models.build(GPT).eval()
    hub.save(model, tmp_path / "model")
    tokens_BS = inputs("gpt2")[:, :16] % 60
    assert torch.equal(logits(hub.load(tmp_path / "model").eval(), tokens_BS), logits(model, tokens_BS))
