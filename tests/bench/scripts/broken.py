"""A benchmark whose operation goes wrong on one rank, in the last element, from 32 bytes on."""

import sys

from echelon.bench.carriers import TorchCarrier
from echelon.bench.options import Options
from echelon.bench.rank import main

right = TorchCarrier.all_reduce


def wrong(self, data):
    call = right(self, data)

    def call_and_spoil():
        call()
        if self._group.rank() == 1 and data.tensor.numel() >= 8:
            data.tensor[-1] += 1

    return call_and_spoil


TorchCarrier.all_reduce = wrong
sys.exit(main(Options("allreduce", 4, 256, 2, 0, validate=True)))
