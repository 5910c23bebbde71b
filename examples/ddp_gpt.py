"""Train a small GPT on the bytes of Python's own standard library: `echelon run -n 2 examples/ddp_gpt.py`.

An ordinary DistributedDataParallel script: the backend's name is all that it says about how its ranks communicate.
"""

import argparse
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH, HEADS, LAYERS = 128, 128, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.byte.weight
        for embedding in (self.byte, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.byte(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def standard_library() -> Tensor:
    """The source of the running interpreter's standard library, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(data: Tensor, size: int, rank: int):
    """Endless random windows, different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=generator)
        windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).long()
        yield windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def sample(model: GPT, prompt: str, length: int) -> str:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        scores = model(tokens[:, -CONTEXT:])[:, -1] / 0.8
        tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1, generator=generator)], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    dist.init_process_group("echelon")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    data = standard_library()
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters / 1e6:.1f} M parameters, {len(data) / 1e6:.1f} MB of Python, {ranks} ranks")

    smooth, start = math.nan, time.perf_counter()
    for step, (x, y) in zip(range(1, arguments.steps + 1), batches(data, arguments.batch, rank), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min(step / 20, 0.5 * (1 + math.cos(math.pi * step / arguments.steps)) + 0.05)
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        if rank == 0 and (step % 5 == 0 or step == arguments.steps):
            seconds = time.perf_counter() - start
            speed = step * arguments.batch * CONTEXT * ranks / seconds
            left = seconds / step * (arguments.steps - step)
            print(
                f"\rstep {step:4d}/{arguments.steps}  loss {smooth:.3f}  {speed:,.0f} bytes/s  {left:3.0f} s left ",
                end="",
                flush=True,
            )

    total = torch.tensor([smooth])
    dist.all_reduce(total, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"\nloss {total.item():.3f} (a byte by chance: {math.log(256):.3f})\nsample:")
        print(sample(model.module, "def ", 300))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
