"""The models compute what `transformers` computes: random small configs, through the files, logits within 1e-4."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from echelon.models import hub
from tests.models.references import CASES, inputs, logits, reference

CAUSAL = [case for case, (kind, _) in CASES.items() if kind not in ("Bert", "ViT", "ResNet")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shards", ["one file", "several files"])
def test_logits(case, shards, tmp_path):
    theirs = reference(case)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "several files" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "several files")
    ours = hub.load(tmp_path).eval()
    expected = logits(theirs, inputs(case))
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(ours, inputs(case)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_saved_folders_are_loaded_by_transformers(case, tmp_path):
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hub.load(tmp_path / "theirs").eval()
    hub.save(ours, tmp_path / "ours", max_shard_bytes=30_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert set(report["missing_keys"]) <= {"cls.predictions.bias"}  # of an untied BERT, which reads another
    for name, value in theirs.state_dict().items():
        if name not in report["missing_keys"]:
            assert torch.equal(again.state_dict()[name], value), name
    assert torch.equal(logits(again.eval(), inputs(case)), logits(theirs, inputs(case)))


@pytest.mark.parametrize("case", CAUSAL)
def test_padding_is_not_seen(case, tmp_path):
    theirs, tokens_BS = reference(case), inputs(case)
    theirs.save_pretrained(tmp_path)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[1, 20:] = 0
    expected = logits(theirs, tokens_BS, attention_mask=mask_BS)
    ours = logits(hub.load(tmp_path).eval(), tokens_BS, mask_BS=mask_BS)
    torch.testing.assert_close(ours[mask_BS.bool()], expected[mask_BS.bool()], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["bert", "bert untied"])
def test_bert_with_mask_and_segments(case, tmp_path):
    theirs, tokens_BS = reference(case), inputs(case)
    theirs.save_pretrained(tmp_path)
    mask_BS, segments_BS = torch.ones_like(tokens_BS), torch.zeros_like(tokens_BS)
    mask_BS[0, 30:] = mask_BS[2, 5:] = 0
    segments_BS[:, 12:] = 1
    expected = logits(theirs, tokens_BS, attention_mask=mask_BS, token_type_ids=segments_BS)
    ours = logits(hub.load(tmp_path).eval(), tokens_BS, mask_BS=mask_BS, segments_BS=segments_BS)
    torch.testing.assert_close(ours[mask_BS.bool()], expected[mask_BS.bool()], rtol=0, atol=1e-4)
    assert not torch.allclose(ours, logits(hub.load(tmp_path).eval(), tokens_BS), atol=1e-2)


@pytest.mark.parametrize("case", ["gpt2", "llama 3"])
def test_positions_given(case, tmp_path):
    theirs, tokens_BS = reference(case), inputs(case)[:, :20]
    theirs.save_pretrained(tmp_path)
    positions_S = torch.arange(17, 37)
    expected = logits(theirs, tokens_BS, position_ids=positions_S[None].expand(3, -1))
    ours = logits(hub.load(tmp_path).eval(), tokens_BS, positions_S=positions_S)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_loss_is_the_sum_of_the_cross_entropies(case, tmp_path):
    reference(case).save_pretrained(tmp_path)
    model = hub.load(tmp_path).eval().double()
    given = inputs(case).double() if inputs(case).is_floating_point() else inputs(case)
    scores = model(given)
    targets = torch.randint(scores.shape[-1], scores.shape[:-1])
    targets[0] = -100
    expected = functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
    torch.testing.assert_close(model(given, targets), expected, rtol=1e-12, atol=0)
    hidden = model(given, hidden=True)
    assert torch.equal(model.head(hidden), scores)


@pytest.mark.parametrize("case", ["gpt2", "llama 3", "bert", "vit"])
def test_bf16_is_near_fp32(case, tmp_path):
    """Rotary tables, norms and the loss do not lose what bf16 itself keeps."""
    reference(case).save_pretrained(tmp_path)
    whole, half = hub.load(tmp_path).eval(), hub.load(tmp_path, dtype=torch.bfloat16).eval()
    given = inputs(case)
    expected = logits(whole, given)
    found = logits(half, given.bfloat16() if given.is_floating_point() else given)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() / expected.norm() < 0.03
