"""Saves a first checkpoint, and is killed in the middle of the second: `dies_in_save.py FOLDER MOMENT`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.train.checkpoints import LEG, Training
from tests.train.test_checkpoint import SHARD_2_OF_TWO

folder, moment = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("echelon")
torch.set_num_threads(1)
training = Training("gpt", SHARD_2_OF_TWO, folder)
for number in range(LEG):
    training.step(number)
training.checkpoints.save(LEG, {"samples": 4 * LEG})
training.checkpoints.wait()
training.step(LEG)


def dying(victim: int, function: Any, calls: int) -> Any:
    """The function, which kills a rank instead of being called for the so-manieth time."""
    left = [calls]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return call


if moment == "while it writes":
    torch.save = dying(1, torch.save, 20)
elif moment == "before it is renamed":
    Path.rename = dying(0, Path.rename, 2)  # type: ignore[method-assign]  # the first is DCP's, of its metadata
training.checkpoints.save(LEG + 1, {"samples": 4 * (LEG + 1)})
training.checkpoints.wait()
print("RESULT nobody died")
