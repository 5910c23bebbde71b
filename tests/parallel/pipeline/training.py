"""How ranks train models in a pipeline, and how far that is from one process with the same microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import echelon
from echelon.models.gpt import GPT, GPTConfig
from echelon.models.held import name_in
from echelon.models.resnet import ResNet, ResNetConfig
from echelon.parallel import batch as batches
from echelon.parallel import data
from echelon.parallel.apply import Strategies, parallelize, pipeline
from echelon.parallel.layout import Layout
from echelon.parallel.optimizer import Optimizer
from echelon.parallel.pipeline.partition import partition
from tests.parallel.matrix import grid_of, targets, worse

STEPS, LENGTH, VOCABULARY, SAMPLES = 2, 8, 31, 2  # samples of a microbatch, for each of dp
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def build(family: str, tied: bool = True) -> nn.Module:
    """Chains of eight links, or of six where stages are few."""
    if family == "resnet":
        return ResNet(ResNetConfig(classes=10, stem_dim=8, dims=(8, 16), depths=(3, 3)))
    layers = 4 if family == "short gpt" else 6
    config = GPTConfig(vocabulary=VOCABULARY, context=LENGTH, dim=16, layers=layers, heads=2, dropout=0.1, tied=tied)
    return GPT(config)


def microbatch(family: str, step: int, number: int, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    numbers = torch.arange(number * samples, (number + 1) * samples)
    if family == "resnet":
        images = torch.randn(samples, 3, 16, 16, generator=generator, dtype=torch.float64)
        made = {"images_BCHW": images, "targets_B": torch.randint(10, (samples,), generator=generator)}
    else:
        tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
        made = {"tokens_BS": tokens[:, :-1], "targets_BS": tokens[:, 1:]}
    return made | {"samples_B": numbers}


def count(family: str, microbatches: int, samples: int) -> int:
    return microbatches * samples * (1 if family == "resnet" else LENGTH)


@cache
def alone(family: str, microbatches: int, samples: int) -> tuple[list[tuple[float, dict[str, Tensor], float]], Any]:
    """Of every step the loss, all gradients and their norm; at the end all that the model holds."""
    model: Any = build(family).double()
    optimizer = SGD(model.parameters())
    told = []
    for step in range(STEPS):
        model.place.step = step
        total = 0.0
        for number in range(microbatches):
            loss = model(**microbatch(family, step, number, samples)) / count(family, microbatches, samples)
            loss.backward()
            total += loss.item()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
        told.append((total, gradients, torch.stack([each.norm() for each in gradients.values()]).norm().item()))
        optimizer.step()
        optimizer.zero_grad()
    return told, {name: each.clone() for name, each in model.state_dict().items()}


def train(
    family: str, degrees: dict[str, int], how: dict[str, Any], microbatches: int, device: str = "cpu"
) -> dict[str, Any]:
    """A rank's largest relative errors, and what was communicated in the last step."""
    layout = Layout(**degrees)
    samples = SAMPLES * layout.dp
    reference, ended = alone(family, microbatches, samples)
    grid = grid_of(layout, device)
    strategies = Strategies(precision="fp64", global_batchnorm=True, **how)
    model: Any = parallelize(build(family).double().to(device), grid, strategies)
    optimizer = Optimizer(SGD, model)
    pipe = pipeline(model, grid, strategies, microbatches)
    worst: dict[str, float] = defaultdict(float)
    sent: dict[tuple[str, str], int] = {}
    for step, (loss_alone, gradients_alone, norm_alone) in enumerate(reference):
        model.place.step = step
        whole = [microbatch(family, step, number, samples) for number in range(microbatches)]
        given = [
            batches.part(each, grid, kind=strategies.sequence, first=number * samples)
            for number, each in enumerate(whole)
        ]
        given = [{name: each.to(device) for name, each in mine.items()} for mine in given]
        with echelon.comm.record() as records:
            counted = batches.count(torch.cat([targets(each) for each in given]), grid.mesh("data"))
            losses = pipe.run(given, lambda out, _: out / counted)
        total = torch.tensor(sum(x.item() for x in losses if x is not None), dtype=torch.float64)
        dist.all_reduce(total)
        worst["loss"] = worse(worst["loss"], abs(total.item() / layout.tp / loss_alone - 1))
        for name, gradient in data.full_gradients(model).items():
            expected = gradients_alone[name_in(model, name)]
            error = (gradient.cpu() - expected).norm() / expected.norm()
            worst["gradient"] = worse(worst["gradient"], error.item())
        with echelon.comm.record() as updating:
            norm = optimizer.step()
        worst["norm"] = worse(worst["norm"], abs(norm / norm_alone - 1))
        sent = by_operation([*records, *updating])
    for name, buffer in model.named_buffers():
        worst["buffers"] = worse(worst["buffers"], (buffer.cpu() - ended[name]).abs().max().item())
    for name, parameter in data.full_parameters(model).items():
        expected = ended[name_in(model, name)]
        worst["parameters"] = worse(worst["parameters"], (parameter.cpu() - expected).abs().max().item())
    return {"errors": dict(worst), "traffic": sent}


def newest(schedule: str, stages: int, stage: int, number: int) -> int:
    """The version of its weights that a stage uses for a microbatch."""
    if schedule == "pipedream":
        return max(0, number - (stages - 1 - stage))
    return max(0, number // stages - 1)


@cache
def alone_with_versions(family: str, schedule: str, stages: int, microbatches: int, samples: int) -> Any:
    """One process that computes each microbatch with the weights that each stage would have: the losses of every step,
    and all that the model holds at the end.
    """
    model: Any = build(family, tied=False).double()
    spans = partition(model, stages)
    links = [span_of(name, model.links(), spans) for name, _ in model.named_parameters()]
    optimizer, each = SGD(model.parameters()), 1 if schedule == "pipedream" else stages
    told = []
    for step in range(STEPS):
        model.place.step = step
        versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
        losses = []
        for number in range(microbatches):
            weights = {
                name: versions[newest(schedule, stages, stage, number)][name].requires_grad_()
                for (name, _), stage in zip(model.named_parameters(), links, strict=True)
            }
            loss = functional_call(model, weights, kwargs=microbatch(family, step, number, samples))
            loss = loss / count(family, each, samples)
            for (_, parameter), gradient in zip(
                model.named_parameters(), torch.autograd.grad(loss, list(weights.values())), strict=True
            ):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            losses.append(loss.item())
            if (number + 1) % each == 0:
                optimizer.step()
                optimizer.zero_grad()
                versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
        told.append(losses)
    return told, {name: each.clone() for name, each in model.state_dict().items()}


def span_of(name: str, links: list[list[str]], spans: list[range]) -> int:
    """The stage that a parameter belongs to."""
    [link] = [n for n, parts in enumerate(links) if any(name == part or name.startswith(f"{part}.") for part in parts)]
    [stage] = [number for number, span in enumerate(spans) if link in span]
    return stage


def train_with_versions(family: str, schedule: str, stages: int, dp: int, microbatches: int) -> dict[str, Any]:
    """A rank's largest errors, how many copies of its weights it had, and what was communicated in the last step."""
    samples = SAMPLES * dp
    reference, ended = alone_with_versions(family, schedule, stages, microbatches, samples)
    grid = grid_of(Layout(dp=dp, pp=stages), "cpu")
    strategies = Strategies(precision="fp64", global_batchnorm=True, schedule=schedule)
    model: Any = parallelize(build(family, tied=False).double(), grid, strategies)
    optimizer = Optimizer(SGD, model)
    pipe = pipeline(model, grid, strategies, microbatches)
    worst: dict[str, float] = defaultdict(float)
    sent: dict[tuple[str, str], int] = {}
    for step, losses_alone in enumerate(reference):
        model.place.step = step
        whole = [microbatch(family, step, number, samples) for number in range(microbatches)]
        given = [batches.part(each, grid, first=number * samples) for number, each in enumerate(whole)]
        with echelon.comm.record() as records:
            updates = [torch.cat([targets(given[number]) for number in update]) for update in pipe.schedule.updates]
            counts = batches.counts(updates, grid.mesh("data"))
            each = microbatches // len(updates)
            losses = pipe.run(given, lambda out, number: out / counts[number // each], optimizer)
        sent = by_operation(records)
        own = torch.tensor([0.0 if loss is None else loss.item() for loss in losses], dtype=torch.float64)
        dist.all_reduce(own)
        worst["loss"] = worse(
            worst["loss"], (own / torch.tensor(losses_alone, dtype=torch.float64) - 1).abs().max().item()
        )
    for name, tensor in model.state_dict().items():
        worst["state"] = worse(worst["state"], (tensor - ended[name]).abs().max().item())
    assert pipe.versions is not None
    return {"errors": dict(worst), "copies": pipe.versions.most, "traffic": sent}


def by_operation(records: Iterable[Any]) -> dict[tuple[str, str], int]:
    """Payload by dimension and operation."""
    sent: dict[tuple[str, str], int] = defaultdict(int)
    for record in records:
        sent[record.dimension, record.operation] += record.payload
    return {key: payload for key, payload in sent.items() if payload}
