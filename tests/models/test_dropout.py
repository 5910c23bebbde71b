"""Dropout draws the same mask whatever part of the batch and of the sequence is held."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from echelon.models.gpt import GPT, GPTConfig
from echelon.models.parts import Dropout, Place

BATCH, LENGTH, DIM = 6, 8, 128
SMALL = GPTConfig(vocabulary=64, context=16, dim=32, layers=2, heads=4, dropout=0.2, attention_dropout=0.3)


def dropout(p: float = 0.25, *, number: int = 3, seed: int = 7, step: int = 11) -> Dropout:
    module = Dropout(p)
    module.number, module.place = number, Place(seed=seed, step=step)
    return module


def test_pieces_of_the_batch_and_of_the_sequence_make_the_whole():
    module, x_BSD = dropout(), torch.randn(BATCH, LENGTH, DIM)
    whole = module(x_BSD)
    rows = []
    for samples in torch.arange(BATCH).split(2):
        pieces = []
        for positions in torch.arange(LENGTH).split(3):
            module.place.move(samples, positions)
            pieces.append(module(x_BSD[samples][:, positions]))
        rows.append(torch.cat(pieces, 1))
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("given", [True, False], ids=["positions given", "positions by default"])
def test_regions_split_by_sequence_hold_their_slice(given):
    module, x_BSD = dropout(), torch.randn(BATCH, LENGTH, DIM)
    positions = torch.arange(LENGTH) if given else None
    module.place.move(None, positions)
    whole = module(x_BSD)
    pieces = []
    for index, piece in enumerate(x_BSD.tensor_split(4, 1)):
        module.place.part = index, 4
        pieces.append(module(piece))
    assert torch.equal(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_expectation(p):
    """Of 1.6 million draws: within five standard deviations of p, in all, by feature and by token."""
    kept = dropout(p)(torch.ones(64, 200, DIM)) != 0
    deviation = (p * (1 - p)) ** 0.5
    for share, draws in [
        (kept.double().mean().view(1), kept.numel()),
        (kept.double().mean((0, 1)), 64 * 200),
        (kept.double().mean(2).flatten(), DIM),
    ]:
        assert ((share - (1 - p)).abs() < 6 * deviation / draws**0.5).all()
    torch.testing.assert_close(dropout(p)(torch.ones(2, 2, DIM)).max().item(), 1 / (1 - p))


def test_masks_are_independent():
    """Of neighbours in each of the dimensions that the hash mixes, and of the next step, module and seed."""
    ones = torch.ones(32, 64, DIM)
    kept = (dropout(0.5)(ones) != 0).double() * 2 - 1
    others = [
        kept.roll(1, 0),
        kept.roll(1, 1),
        kept.roll(1, 2),
        *(
            (dropout(0.5, **change)(ones) != 0).double() * 2 - 1
            for change in ({"step": 12}, {"number": 4}, {"seed": 8}, {"seed": 7 + 2**40})
        ),
    ]
    for other in others:
        assert (kept * other).mean().abs() < 5 / kept.numel() ** 0.5


def test_evaluation_drops_nothing():
    x_BSD = torch.randn(2, 3, 4)
    assert torch.equal(dropout().eval()(x_BSD), x_BSD)
    assert torch.equal(dropout(0.0)(x_BSD), x_BSD)


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_not_a_probability(p):
    with pytest.raises(ValueError, match="not a probability"):
        Dropout(p)


def test_every_dropout_of_a_model_has_its_own_number_and_one_place():
    model = GPT(SMALL)
    dropouts = [module for module in model.modules() if isinstance(module, Dropout)]
    assert sorted(module.number for module in dropouts) == list(range(1 + 3 * SMALL.layers))
    assert all(module.place is model.place for module in dropouts)


def test_a_model_in_pieces_of_the_batch_equals_the_whole():
    model, tokens_BS = GPT(SMALL).double(), torch.randint(SMALL.vocabulary, (BATCH, LENGTH))
    whole = model(tokens_BS)
    pieces = [model(tokens_BS[samples], samples_B=samples) for samples in torch.arange(BATCH).split(2)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(tokens_BS[2:4]), whole[2:4])


def test_steps_differ():
    model, tokens_BS = GPT(SMALL), torch.randint(SMALL.vocabulary, (BATCH, LENGTH))
    first = model(tokens_BS)
    assert torch.equal(model(tokens_BS), first)
    model.place.step = 1
    assert not torch.allclose(model(tokens_BS), first)


def test_recomputation_drops_the_same_though_other_samples_came_between():
    model = GPT(SMALL).double()
    tokens_BS = torch.randint(SMALL.vocabulary, (BATCH, LENGTH))

    def gradients(recompute: bool) -> list[torch.Tensor]:
        for block in model.blocks:
            forward = type(block).forward.__get__(block)
            block.forward = (
                (lambda *inputs, forward=forward: checkpoint(forward, *inputs, use_reentrant=False))
                if recompute
                else forward
            )
        losses = [model(tokens_BS[part], tokens_BS[part], samples_B=part) for part in torch.arange(BATCH).split(3)]
        return list(torch.autograd.grad(sum(losses), list(model.parameters())))

    for ours, reference in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
