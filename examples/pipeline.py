"""A plain nn.Sequential cut over ranks: losses and gradients are those of one process, whatever the schedule.

echelon run -n 4 examples/pipeline.py
echelon run -n 4 examples/pipeline.py --schedule chimera
echelon run -n 2 examples/pipeline.py --schedule interleaved --chunks 2 --microbatches 4
"""

import argparse
import copy

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from echelon.parallel.apply import Strategies, parallelize, pipeline
from echelon.parallel.layout import Layout
from echelon.parallel.pipeline.simulate import Costs, simulate
from echelon.parallel.pipeline.terminal import terminal

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
names = "gpipe, 1f1b, interleaved, zero-bubble, gems, gems-gpipe or chimera"
parser.add_argument("--schedule", default="1f1b", help=names)
parser.add_argument("--chunks", type=int, default=1, help="stages of each rank, of interleaved")
parser.add_argument("--microbatches", type=int, default=8)
given = parser.parse_args()

dist.init_process_group("echelon")
torch.manual_seed(0)  # all ranks begin with the same model and microbatches
blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
whole = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 4)).double()
alone = copy.deepcopy(whole)
inputs = torch.randn(given.microbatches, 8, 16, dtype=torch.float64)
targets = torch.randn(given.microbatches, 8, 4, dtype=torch.float64)


def loss(out: Tensor, microbatch: int) -> Tensor:
    """A microbatch's share of the mean over all."""
    return nn.functional.mse_loss(out, targets[microbatch], reduction="sum") / targets.numel()


grid = Layout(pp=dist.get_world_size()).build()
strategies = Strategies(schedule=given.schedule, chunks=given.chunks, precision="fp64")
model = parallelize(whole, grid, strategies)  # of the whole, this rank's links
pipe = pipeline(model, grid, strategies, given.microbatches)
losses = pipe.run([(x,) for x in inputs], loss)  # with gradients in the parameters; None where a loss is elsewhere

sum(loss(alone(x), number) for number, x in enumerate(inputs)).backward()
pairs = [(p.grad, alone.get_parameter(name).grad) for name, p in model.named_parameters()]  # names are the whole's
errors = [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs]
told = [None] * dist.get_world_size()
dist.all_gather_object(told, ([name for name, _ in model.named_children()], max(errors), losses))
if dist.get_rank() == 0:
    console = Console()
    console.print(terminal(simulate(pipe.schedule, Costs()), colour=console.is_terminal), soft_wrap=True)
    for rank, (links, error, _) in enumerate(told):
        print(f"rank {rank}: links {', '.join(links)}; gradients differ from one process by {error:.0e}")
    total = sum(each.item() for _, _, found in told for each in found if each is not None)
    expected = sum(loss(alone(x), number).item() for number, x in enumerate(inputs))
    print(f"loss {total:.12f}, of one process {expected:.12f}")
dist.destroy_process_group()
