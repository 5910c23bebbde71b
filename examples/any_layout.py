"""A small GPT in any layout: the losses are those of one process, whatever the degrees.

echelon run -n 1 examples/any_layout.py
echelon run -n 8 examples/any_layout.py --dp 2 --tp 2 --cp 2 --stage 3
echelon run -n 4 --record record examples/any_layout.py --dp 4 --replicate 2 --stage 3; echelon trace record
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from echelon import models
from echelon.parallel import batch
from echelon.parallel.apply import Strategies, parallelize
from echelon.parallel.layout import Layout
from echelon.parallel.optimizer import Optimizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for degree in ("dp", "tp", "cp", "replicate"):
    parser.add_argument(f"--{degree}", type=int, default=1)
parser.add_argument("--stage", type=int, default=0, help="what is sharded: 0 nothing, 1 optimizer, 2 gradients, 3 all")
parser.add_argument("--sequence", default="ring", help="how --cp splits sequences: ring or ulysses")
parser.add_argument("--precision", default="fp32", help="fp64, fp32, bf16 or fp16")
parser.add_argument("--recompute", default="none", help="none, selective or full")
parser.add_argument("--steps", type=int, default=10)
given = parser.parse_args()

dist.init_process_group("echelon")
layout = Layout(dp=given.dp, tp=given.tp, cp=given.cp, replicate=given.replicate)
grid = layout.build()
strategies = Strategies(
    stage=given.stage, sequence=given.sequence, precision=given.precision, recompute=given.recompute
)
model = models.build("gpt2", vocabulary=256, context=128, dim=128, layers=4, heads=4, dropout=0.1)
model = parallelize(model, grid, strategies)
optimizer = Optimizer(partial(torch.optim.AdamW, lr=1e-3), model)
if dist.get_rank() == 0:
    print(layout)

text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()  # bytes of a module
for step in range(given.steps):
    model.place.step = step  # dropout draws by step, sample and position: alike in every layout
    starts = torch.randint(len(text) - 129, (8,), generator=torch.Generator().manual_seed(step))
    samples = torch.stack([text[start : start + 129] for start in starts])
    mine = batch.part({"tokens_BS": samples[:, :-1], "targets_BS": samples[:, 1:]}, grid, kind=given.sequence)
    loss = model(**mine) / batch.count(mine["targets_BS"], grid.mesh("data"))
    optimizer.scale(loss).backward()
    norm = optimizer.step(max_norm=1.0)
    total = loss.detach()
    dist.all_reduce(total, group=grid.mesh("data").get_group())
    if dist.get_rank() == 0:
        print(f"step {step}  loss {total.item():.4f}  norm {norm:.3f}")
dist.destroy_process_group()
