"""Any model over tiles of an image: losses and gradients are those of one process, and each rank saves its share.

echelon run -n 4 examples/tiles.py                  # four rows of tiles
echelon run -n 4 examples/tiles.py --tiles 2 2      # two rows, two columns
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.parallel import spatial

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tiles", type=int, nargs="+", metavar="N", help="rows, and columns (default: a row a rank)")
parser.add_argument("--side", type=int, default=301, help="pixels of the image")
given = parser.parse_args()

dist.init_process_group("echelon")
torch.manual_seed(0)  # all ranks begin with the same model and image
layers = [nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
for _ in range(3):
    layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
alone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).double()
image, target = torch.randn(1, 3, given.side, given.side, dtype=torch.float64), torch.tensor([3])


def saved(model: nn.Module) -> tuple[Tensor, int]:
    """The loss, and the bytes that are kept for its backward pass."""
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = nn.functional.cross_entropy(model(image), target)
    return loss, sum(kept.values())


tiles = tuple(given.tiles or [dist.get_world_size()])
mesh = dist.init_device_mesh("cpu", tiles, mesh_dim_names=("rows", "columns")[: len(tiles)])
model = spatial.tile(copy.deepcopy(alone), mesh)

loss, here = saved(model)
loss.backward()
expected, whole = saved(alone)
expected.backward()
worst = 0.0
for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
    dist.all_reduce(ours.grad)  # each rank has its share
    worst = max(worst, ((ours.grad - theirs.grad).norm() / theirs.grad.norm()).item())
if dist.get_rank() == 0:
    print(f"loss {loss.item():.12f}, of one process {expected.item():.12f}; gradients differ by {worst:.0e}")
    print(f"a rank saves {here / whole:.2f} of what one process does")
dist.destroy_process_group()
