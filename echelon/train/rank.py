"""One rank of a run: trains, writes the report, and turns what goes wrong into words and an exit code.

`echelon train` starts `python -m echelon.train.rank FOLDER` on every rank; under another launcher it is one itself.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from pathlib import Path

import torch.distributed as dist

from echelon.comm.start import refuse
from echelon.train.checkpoint import CheckpointError
from echelon.train.config import Config, ConfigError, load
from echelon.train.data import DataError
from echelon.train.faults import STOP_FILE, Diverged, StopRequest
from echelon.train.follow import Follower
from echelon.train.loop import Trainer
from echelon.train.report import write_report
from echelon.train.rows import FILE as METRICS
from echelon.train.sample import write_sample

STARTING = "starting.toml"  # the config that a job is started with; the run's own, if it can be trained so
REFUSED = 2  # the exit code where starting again would not help
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES)


def train(config: Config, folder: Path | None, *, follow: bool = False) -> tuple[bool, Path]:
    """Whether all steps were taken (or the run was asked to stop before), and its folder. The first rank shows how it
    goes, if nobody else does: `follow`.
    """
    try:
        with StopRequest() as stop:
            trainer = Trainer(config, folder)
            steps, first = trainer.config.train.steps, dist.get_rank() == 0
            with Follower(trainer.folder / METRICS, steps) if follow and first else contextlib.nullcontext():
                outcome = trainer.run(stop)
        if outcome.done and config.train.sample:
            write_sample(trainer)
        dist.barrier()  # all ranks have closed their records
        if first:
            (trainer.folder / STOP_FILE).unlink(missing_ok=True)
            write_report(trainer.folder)
    except (ConfigError, CheckpointError, DataError, Diverged) as error:
        refuse(str(error), REFUSED)
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        refuse(f"{error.filename or folder} cannot be written: {error.strerror}", REFUSED)
    dist.destroy_process_group()
    return outcome.done, trainer.folder


if __name__ == "__main__":
    train(load(Path(sys.argv[1]) / STARTING), Path(sys.argv[1]))
